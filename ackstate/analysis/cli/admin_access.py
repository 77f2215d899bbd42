"""Access to the admin server of a live broker: the token, and the packages that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.analysis.token_file import open_token_file
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from pathlib import Path

_TOKEN_FILE_BYTES_MAX = 64 * 1024


def read_token(path: Path | None) -> str:
    """Return the stripped content of a file; error messages never contain it. Empty without a file.

    Raises:
        AckStateError: It is not one word of ASCII.
        OSError: The file cannot be read.
    """
    if path is None:
        return ""
    with open_token_file(path) as file:
        content = file.read(_TOKEN_FILE_BYTES_MAX + 1)
    try:
        token = content.decode("ascii").strip()
    except ValueError:
        token = ""
    if not token.isprintable() or not token or " " in token or len(content) > _TOKEN_FILE_BYTES_MAX:
        raise AckStateError(f"{path}: expected a token, which is one word of ASCII")
    return token


def check_extra() -> None:
    """Raise `AckStateError` unless the packages of the extra ``admin`` are installed that a client needs."""
    try:
        import pydantic  # noqa: F401
    except ImportError as error:
        raise AckStateError(f"{error.name} is missing: install ackstate[admin]") from error
