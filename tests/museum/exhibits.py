"""The museum's catalogue: every exhibit, in the order of its number."""

from __future__ import annotations

from museum.files import FILES
from museum.limits_passed import LIMITS
from museum.persists import PERSISTS
from museum.recoveries import RECOVERIES

EXHIBITS = tuple(
    sorted(
        (*FILES, *PERSISTS, *LIMITS, *RECOVERIES),
        key=lambda exhibit: (int(exhibit.name[1:].removesuffix("-sqlite")), exhibit.name),
    )
)
