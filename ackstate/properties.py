"""Reads the properties of a Pulsar broker like ``java.util.Properties``, with numbers and switches among them.

A missing or blank value is unset, as in Pulsar, and None here. Every error names the key.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from ackstate.spelling import closest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

INT_MAX = 2**31 - 1  # Java's Integer.MAX_VALUE
LONG_MAX = 2**63 - 1
LONG_MIN = -LONG_MAX - 1

_WHOLE = re.compile(r"[+-]?[0-9]{1,19}")
_BLANKS = " \t\f"
_LINE_END = re.compile(r"\r\n|\r|\n")  # str.splitlines splits at many more characters
_KEY_AND_VALUE = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

# Keys of Pulsar that are similar enough to one of ours to look like its misspelling.
_NEIGHBOURS = frozenset(
    {
        "managedLedgerMaxEntriesPerLedger",
        "managedLedgerInfoCompressionType",
        "managedLedgerInfoCompressionThresholdInBytes",
    }
)
_LIKENESS_MIN = 0.9  # between 0 and 1: allows one or two words or a few letters to differ
_BEGINNING_MIN = 0.7  # between 0 and 1: allows the last one or two words to be missing


def decode_properties(content: bytes) -> dict[str, str]:
    r"""Return the keys and values of a file in UTF-8, or else in Latin-1, which accepts any bytes.

    Raises:
        ValueError: A ``\u`` is not followed by four hexadecimal digits.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = content.decode("latin-1")
    return parse_properties(text)


def parse_properties(text: str) -> dict[str, str]:
    r"""Return the keys and values of a text like ``java.util.Properties.load``; the last value of a key wins.

    >>> parse_properties("# a comment\nname = value\\\n  continued\nother:\\u0041")
    {'name': 'valuecontinued', 'other': 'A'}

    Raises:
        ValueError: A ``\u`` is not followed by four hexadecimal digits.
    """
    properties = {}
    for line in _logical_lines(text):
        found = _KEY_AND_VALUE.fullmatch(line)
        assert found is not None
        properties[_unescape(found[1])] = _unescape(found[2])
    return properties


def given(properties: Mapping[str, str], key: str) -> str:
    """Return a value without the blanks around it; empty if there is none.

    Raises:
        TypeError: The value is not text.
    """
    value = properties.get(key, "")
    if not isinstance(value, str):
        raise TypeError(f"{key} must be text, got {value!r}")
    return value.strip()


def whole_number(properties: Mapping[str, str], key: str, *, least: int, most: int = INT_MAX) -> int | None:
    """Return a whole number within inclusive bounds.

    Raises:
        ValueError: It is not a whole number, or out of bounds.
        TypeError: The value is not text.
    """
    value = given(properties, key)
    if not value:
        return None
    if not _WHOLE.fullmatch(value) or not least <= int(value) <= most:
        raise ValueError(f"{key} must be a whole number from {least} to {most}, got {value!r}")
    return int(value)


def number(properties: Mapping[str, str], key: str) -> float | None:
    """Return a finite number.

    Raises:
        ValueError: It is not a finite number.
        TypeError: The value is not text.
    """
    value = given(properties, key)
    if not value:
        return None
    if not _NUMBER.fullmatch(value) or not math.isfinite(float(value)):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(value)


def flag(properties: Mapping[str, str], key: str) -> bool | None:
    """Return a switch, in letters of either case.

    Raises:
        ValueError: It is neither true nor false.
        TypeError: The value is not text.
    """
    value = given(properties, key).casefold()
    if value not in {"", "true", "false"}:
        raise ValueError(f"{key} must be true or false, got {value!r}")
    return value == "true" if value else None


def check_spelling(properties: Iterable[str], keys: Collection[str]) -> None:
    """Refuse an unknown key that looks like a misspelling or the beginning of a key that is read.

    Raises:
        ValueError: A key looks like that; the message names both keys.
        TypeError: A key is not text.
    """
    folded = {known.casefold(): known for known in (*keys, *_NEIGHBOURS)}
    for key in properties:
        if not isinstance(key, str):
            raise TypeError(f"the name of a setting must be text, got {key!r}")
        if key in keys or key in _NEIGHBOURS:
            continue
        meant = folded.get(_likest(key.casefold(), folded))
        if meant in keys:
            raise ValueError(f"unknown key of Pulsar {key!r}; did you mean {meant!r}?")


def _likest(key: str, known: Iterable[str]) -> str:
    for each in known:
        if each.startswith(key) and len(key) >= _BEGINNING_MIN * len(each):
            return each
    return closest(key, known, likeness_min=_LIKENESS_MIN)


def _logical_lines(text: str) -> Iterator[str]:
    """Join continued lines, and skip blank lines and comments, which do not exist after a continuation."""
    begun: str | None = None
    for natural in _LINE_END.split(text):
        line = natural.lstrip(_BLANKS)
        if not begun and (not line or line[0] in "#!"):
            begun = None
            continue
        begun = (begun or "") + line
        if _ends_in_escape(line):
            begun = begun[:-1]
            continue
        yield begun
        begun = None
    if begun:
        yield begun


def _ends_in_escape(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda escape: _unescaped(escape[1], text), text)


def _unescaped(escaped: str, text: str) -> str:
    if len(escaped) > 1:
        return chr(int(escaped[1:], 16))
    if escaped == "u":
        raise ValueError(f"malformed \\u escape in {text!r}")
    return _CONTROLS.get(escaped, escaped)
