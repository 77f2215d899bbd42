"""The errors that leave the library, besides a caller's ``ValueError`` or ``TypeError``."""

import copyreg
from typing import NoReturn


class AckStateError(Exception):
    """The base class of errors whose reason is outside the caller's code; they can be copied and pickled."""

    def __reduce__(self) -> tuple[object, ...]:
        # Not by the constructor, as of other exceptions: it may take other arguments than the message.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class CorruptStateError(AckStateError):
    """Stored bytes are damaged, cut short, or foreign.

    Args:
        what: The damaged thing, in words, such as ``native record``.
        offset: Offset of the first wrong byte.
        expected: The expected content at the offset.
        found: The actual content at the offset.
    """

    def __init__(self, what: str, *, offset: int, expected: object, found: object) -> None:
        super().__init__(f"{what}: at byte {offset} expected {expected}, found {found}")
        self.what = what
        self.offset = offset
        self.expected = expected
        self.found = found


class UnsupportedVersionError(AckStateError):
    """Stored bytes have a version that this release does not read; guessing their meaning could invent acks."""


def corrupt(what: str, offset: int, expected: object, found: object) -> NoReturn:
    """Raise `CorruptStateError`, without the error under way as its context."""
    raise CorruptStateError(what, offset=offset, expected=expected, found=found) from None


def check_version(version: int, supported: int, *, what: str) -> None:
    """Raise `UnsupportedVersionError` for another version; 0 is none, so such bytes are damaged."""
    if version not in (0, supported):
        raise UnsupportedVersionError(f"{what} has version {version}; this release reads version {supported}")


class InvalidPositionError(AckStateError):
    """A position that the message log never had, or that is beyond its end."""


class RescheduleRefusedError(AckStateError):
    """A message can no longer be cancelled or rescheduled, for the reason named; nothing was changed."""


class CursorClosedError(AckStateError):
    """The cursor was closed; open it again to continue."""


class TopicClosedError(CursorClosedError):
    """The topic was closed; open it again to continue."""


class CursorFencedError(AckStateError):
    """Another owner has opened the cursor since; this one can no longer write."""


class LogFencedError(CursorFencedError):
    """Another owner has opened the topic's message log since; this one can no longer publish."""
