"""Formats numbers and names for sentences."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number of things in words, the plural with an s unless it is given."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def size_text(size_bytes: int) -> str:
    """Return a size in KB or MB, with three digits.

    >>> size_text(340), size_text(4_200), size_text(123_456_789)
    ('0.34 KB', '4.2 KB', '123 MB')
    """
    return f"{size_bytes / 1e6:,.3g} MB" if size_bytes >= 1_000_000 else f"{size_bytes / 1e3:.3g} KB"


def printable(text: str) -> str:
    r"""Return untrusted text with invisible, bidirectional and control characters escaped, and ends of lines.

    >>> printable("orders"), printable("a" + chr(0x202E) + "b" + chr(27) + chr(10))
    ('orders', 'a\\u202eb\\x1b\\n')
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def dropped_line(events: int) -> str:
    """Return how many events a trace lacks, in words."""
    return f"{counted(events, 'event')} dropped by the recorder: acks and persists may be missing"
