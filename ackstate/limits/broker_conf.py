"""Reads the limits' properties of a Pulsar broker, given as a mapping or as the path of a ``broker.conf``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate.properties import check_spelling, decode_properties

if TYPE_CHECKING:
    from collections.abc import Collection


def read_conf(source: Mapping[str, str] | str | Path, *, keys: Collection[str]) -> Mapping[str, str]:
    """Return the properties of a broker.

    Raises:
        ValueError: A key that is not Pulsar's looks like a misspelling of one of `keys`; the text names both.
        TypeError: A key is not text, or the source is of another type.
        OSError: The file cannot be read.
    """
    properties = source if isinstance(source, Mapping) else decode_properties(Path(source).read_bytes())
    check_spelling(properties, keys)
    return properties
