"""What does an error of the operating system mean for a store?"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ackstate.cursor.store import StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The numbers of the errors by which a system says that there is no room."""


@contextmanager
def system_errors_in_our_words(what: object) -> Iterator[None]:
    """Turn what the operating system says into `StoreError`, of a full disk into `StoreFullError`.

    Args:
        what: What the text begins with.
    """
    try:
        yield
    except OSError as error:
        refusal = StoreFullError if error.errno in FULL else StoreError
        raise refusal(f"{what}: {error.strerror or error}") from error
