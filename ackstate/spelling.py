"""Finds the known word closest to a misspelled one."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def closest(word: str, known: Iterable[str], *, likeness_min: float = 0.6) -> str:
    """Return the known word closest to another, empty if none is close.

    >>> closest("flush_intervall", ["flush_interval_ms", "keep"])
    'flush_interval_ms'

    Args:
        word: The other word.
        known: The words to choose from.
        likeness_min: The least similarity, from 0 to 1, as in `difflib`.
    """
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=likeness_min)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown word, empty if no known word is close.

    >>> f"unknown key 'kep'{did_you_mean('kep', ['keep', 'format'])}"
    "unknown key 'kep'; did you mean 'keep'?"
    """
    meant = closest(word, known)
    return f"; did you mean {meant!r}?" if meant else ""
