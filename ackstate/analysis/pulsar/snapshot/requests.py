"""Requests something of many topics, several at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Answer = TypeVar("_Answer")

AT_ONCE = 8
"""Requests under way."""


def request_all(
    topics: Sequence[str],
    request: Callable[[str], _Answer],
    *,
    done: Callable[[], None] = lambda: None,
    at_once: int = AT_ONCE,
) -> dict[str, _Answer | AckStateError]:
    """Request each topic, and return the answers and errors, in the order of the topics."""

    def answer_of(topic: str) -> _Answer | AckStateError:
        """Return the answer or the error of one topic."""
        try:
            return request(topic)
        except AckStateError as error:
            return error
        finally:
            done()

    pool = ThreadPoolExecutor(at_once)
    try:
        return dict(zip(topics, pool.map(answer_of, topics), strict=True))
    finally:
        # After Ctrl-C no further request starts.
        pool.shutdown(cancel_futures=True)
