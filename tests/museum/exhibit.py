"""Defines an exhibit of the museum: a bug that was once shipped, ready to be planted in our code."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


class Replacement(NamedTuple):
    """One attribute of our code and its replacement while a bug is planted; its owner must have it itself."""

    owner: object
    name: str
    by: object


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A bug of the museum."""

    # ``M1`` to ``M16``; with ``-sqlite`` if the mistake is made in `SqliteStore`, as others made it in theirs
    name: str
    title: str  # The mistake
    happened: str  # Where it was really made, with the public issue
    planted: str  # How our code makes it while `plant` is entered, and how far that differs from the real one
    # Returns the replacements; called again each time, so that no exhibit depends on another
    replacements: Callable[[], tuple[Replacement, ...]]

    def plant(self):
        """Make the mistake until the context is left."""
        return _replaced(self.replacements())


@contextmanager
def _replaced(replacements):
    with pytest.MonkeyPatch.context() as planted:
        for owner, name, by in replacements:
            # An inherited or renamed attribute would be planted without effect.
            assert name in vars(owner), f"{owner!r} has no {name!r} of its own: the exhibit has to follow the product"
            planted.setattr(owner, name, by)
        yield
