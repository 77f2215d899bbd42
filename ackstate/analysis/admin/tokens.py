"""The bearer tokens that the server accepts, and their labels for the audit log."""

from __future__ import annotations

import hmac
import os
import re
from typing import TYPE_CHECKING, Protocol, final

from ackstate.analysis.admin.log_lines import LOG
from ackstate.analysis.token_file import open_token_file
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TOKEN = re.compile(rb"[\x21-\x7e]+")
_TOKEN_BYTES_MIN, _TOKEN_BYTES_MAX = 16, 8 * 1024
_FORM = f"one word of {_TOKEN_BYTES_MIN} to {_TOKEN_BYTES_MAX} visible ASCII characters"
_LABEL_BYTES_MAX = 64
_FILE_BYTES_MAX = 64 * 1024


class Tokens(Protocol):
    """The tokens that are accepted now."""

    def label_of(self, given: bytes) -> str | None:
        """Return the label of a token, None if the token is not accepted. Takes constant time."""
        ...


@final
class OneToken:
    """A single token, fixed while the server runs.

    Raises:
        TypeError: It is not bytes.
        ValueError: It is not one word of 16 to 8,192 visible ASCII characters; the message never shows it.
    """

    def __init__(self, token: bytes, *, label: str = "token") -> None:
        if not isinstance(token, bytes):
            raise TypeError(f"the token must be bytes, got {type(token).__name__}")
        if not _is_token(token):
            raise ValueError(f"the token must be {_FORM}")
        self._labels = {token: label}

    def label_of(self, given: bytes) -> str | None:
        """Return the label if it is the token."""
        return _label_of(given, self._labels)


@final
class TokenFile:
    """The tokens of a file, one a line, each alone or after a label and a blank.

    The file is read again for each token that is checked, so a changed file takes effect at once. While the file cannot
    be read or has no tokens, the previous tokens stay valid, and the log has one line about it. Replace the file by a
    rename, so that it is never read half-written. A pipe is read once.

    Raises:
        AckStateError: The file has no tokens.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_read_again = not path.is_fifo()
        self._problem = ""
        with open_token_file(path) as file:
            self._content = file.read(_FILE_BYTES_MAX + 1)
        self._labels = parse_tokens(self._content, where=str(path))

    def label_of(self, given: bytes) -> str | None:
        """Return the label of a token of the file."""
        if self._is_read_again:
            self._read_again()
        return _label_of(given, self._labels)

    def _read_again(self) -> None:
        try:
            content = self._read_now()
            labels = self._labels if content == self._content else parse_tokens(content, where=str(self._path))
        except (OSError, AckStateError) as error:
            if str(error) != self._problem:
                LOG.error("the previous tokens stay valid: %s", error)
                self._problem = str(error)
            return
        if content != self._content or self._problem:
            LOG.info("tokens were read again from %s: %s", self._path, ", ".join(labels.values()))
        self._content, self._labels, self._problem = content, labels, ""

    def _read_now(self) -> bytes:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NONBLOCK)  # must not block on a pipe in its place

        with open(self._path, "rb", opener=opener) as file:
            return file.read(_FILE_BYTES_MAX + 1)


def parse_tokens(content: bytes, *, where: str) -> dict[bytes, str]:
    """Return the labels of the tokens of a file's content; ``line N`` for a token without one.

    >>> parse_tokens(b"ops s3cret-of-the-operators", where="tokens")
    {b's3cret-of-the-operators': 'ops'}

    Raises:
        AckStateError: There is no token, or a line is invalid; the message never shows a token.
    """
    if len(content) > _FILE_BYTES_MAX:
        raise AckStateError(f"{where} holds no token: it is larger than {_FILE_BYTES_MAX} bytes")
    labels: dict[bytes, str] = {}
    for number, line in enumerate(content.splitlines(), 1):
        label, _, word = line.strip().rpartition(b" ")
        if not word:
            continue
        token, label = checked_token(word, where=f"{where}, line {number},"), label.strip()
        if label and (not _TOKEN.fullmatch(label) or len(label) > _LABEL_BYTES_MAX):
            raise AckStateError(
                f"{where}, line {number}, holds no token: a label is one word of up to {_LABEL_BYTES_MAX} visible "
                "ASCII characters, and there is one token a line"
            )
        name = label.decode("ascii") or f"line {number}"
        if token in labels or name in labels.values():
            raise AckStateError(f"{where}, line {number}, repeats a token or a label")
        labels[token] = name
    if not labels:
        raise AckStateError(f"{where} has no token: it is empty")
    return labels


def checked_token(text: bytes, *, where: str) -> bytes:
    """Return a token without the blanks and line ends around it; the error never shows it.

    Raises:
        AckStateError: It has fewer than 16 or too many characters, or some that no header carries.
    """
    token = text.strip()
    if not _is_token(token):
        raise AckStateError(f"{where} holds no token: {_FORM}")
    return token


def _is_token(token: bytes) -> bool:
    return _TOKEN_BYTES_MIN <= len(token) <= _TOKEN_BYTES_MAX and _TOKEN.fullmatch(token) is not None


def _label_of(given: bytes, labels: Mapping[bytes, str]) -> str | None:
    found = None
    for token, label in labels.items():
        # All tokens are compared, so that the time does not depend on the match.
        if hmac.compare_digest(given, token):
            found = label
    return found
