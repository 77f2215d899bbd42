"""Checks every request before it reaches the application: its token, its host and path, and its size."""

from __future__ import annotations

import hmac
import re
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, final

from fastapi import HTTPException

from ackstate.analysis.admin.answers import refusal

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = 64 * 1024

# They reveal nothing from the store.
OPEN_PATHS = frozenset({"/healthz", "/openapi.json"})
_TOKEN_BYTES_MIN, _TOKEN_BYTES_MAX = 16, 8 * 1024
_TOKEN = re.compile(rb"[\x21-\x7e]+")
_LOCAL_HOSTS = frozenset({"", "127.0.0.1", "localhost"})
_LENGTH_DIGITS_MAX = 20
_TOO_LARGE = f"the body is larger than {BODY_BYTES_MAX} bytes"
_CLOSE = {"Connection": "close"}


def check_token(token: bytes) -> None:
    """Check a token that clients must send."""
    if not isinstance(token, bytes):
        raise TypeError(f"the token must be bytes, got {type(token).__name__}")
    if not _TOKEN_BYTES_MIN <= len(token) <= _TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise ValueError(
            f"the token must be one word of {_TOKEN_BYTES_MIN} to {_TOKEN_BYTES_MAX} visible ASCII characters"
        )


@final
class Guard:
    """Refuses a wrong token, an encoded slash in the path, or too large a body; passes on all other requests."""

    def __init__(self, app: ASGIApp, *, token: bytes | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        answer = self._unwelcome(scope, headers) or _unsuitable(scope, headers)
        if answer is None:
            await self._app(scope, _bounded(receive), send)
        else:
            await answer(scope, receive, send)

    def _unwelcome(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        if self._token is None and not _is_loopback(scope.get("client")):
            reason = "without a token, the server answers only connections from 127.0.0.1 or ::1"
            return refusal(403, reason, headers=_CLOSE)
        if self._token is None and not _is_local(headers.get(b"host", b"")):
            return refusal(400, "Host must be 127.0.0.1 or localhost, because the server has no token")
        if scope["path"] not in OPEN_PATHS and not self._is_authorized(headers):
            reason = "the bearer token is missing or wrong"
            return refusal(401, reason, headers={"WWW-Authenticate": "Bearer"})
        return None

    def _is_authorized(self, headers: dict[bytes, bytes]) -> bool:
        if self._token is None:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._token)


def _unsuitable(scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
    # Once decoded, it would be indistinguishable from a slash that separates names.
    if b"%2f" in scope.get("raw_path", b"").lower():
        return refusal(400, "a slash in a name (%2F) is not supported")
    if scope["method"] == "POST" and _media_type(headers) != b"application/json":
        # A page of another origin can make a browser send other types without a preflight, but not this one.
        return refusal(415, "Content-Type must be application/json")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or len(length) > _LENGTH_DIGITS_MAX or int(length) > BODY_BYTES_MAX:
        return refusal(413, _TOO_LARGE, headers=_CLOSE)
    return None


def _bounded(receive: Receive) -> Receive:
    """Return a `Receive` that refuses a body once it is too large: it may come without ``Content-Length``."""
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > BODY_BYTES_MAX:
            raise HTTPException(413, _TOO_LARGE, headers=_CLOSE)
        return message

    return bounded


def _is_loopback(client: tuple[str, int] | None) -> bool:
    try:
        address = ip_address(str(client[0]).partition("%")[0]) if client else None
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address is not None and (mapped or address).is_loopback


def _is_local(host: bytes) -> bool:
    name = re.sub(r":[0-9]*\Z", "", host.decode("latin-1"))
    return name.lower() in _LOCAL_HOSTS


def _media_type(headers: dict[bytes, bytes]) -> bytes:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
