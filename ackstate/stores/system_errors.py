"""Translates errors of the operating system to errors of a store."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ackstate.stores.base import StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The numbers of the system errors for a lack of room."""


@contextmanager
def system_errors_in_our_words(what: object) -> Iterator[None]:
    """Turn an error of the operating system into a `StoreError`, and a full disk into a `StoreFullError`."""
    try:
        yield
    except OSError as error:
        refusal = StoreFullError if error.errno in FULL else StoreError
        raise refusal(f"{what}: {error.strerror or error}") from error
