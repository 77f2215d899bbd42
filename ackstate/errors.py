"""What can go wrong: the errors that leave the library besides a caller's ``ValueError`` or ``TypeError``."""


class AckStateError(Exception):
    """Anything that the library refuses for a reason outside the caller's code; the root of all below."""


class CorruptStateError(AckStateError):
    """Stored bytes are not what was written: damaged, cut, or never ours.

    Args:
        what: The thing that was read, in words, such as ``native record``.
        offset: Byte offset in that thing where the first wrong byte stands.
        expected: What should have stood there.
        found: What stood there.
    """

    def __init__(self, what: str, *, offset: int, expected: object, found: object) -> None:
        super().__init__(f"{what}: at byte {offset} expected {expected}, found {found}")
        self.what = what
        self.offset = offset
        self.expected = expected
        self.found = found


class UnsupportedVersionError(AckStateError):
    """Stored bytes were written by a newer release, and guessing at them could invent acks."""


class InvalidPositionError(AckStateError):
    """A position that the message log never had, or that lies beyond its end."""


class CursorClosedError(AckStateError):
    """The cursor was closed; open it again to go on."""


class CursorFencedError(AckStateError):
    """Another owner has opened the cursor since; this one can do no more writes."""


class LogFencedError(CursorFencedError):
    """Another owner has opened the topic's message log since; this one can publish no more."""
