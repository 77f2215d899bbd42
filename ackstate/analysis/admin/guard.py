"""Checks every request before it reaches the application: its token, its host and path, and its size."""

from __future__ import annotations

import asyncio
import re
from contextlib import nullcontext
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, final
from urllib.parse import unquote

from ackstate.analysis.admin.answers import refusal
from ackstate.analysis.admin.log_lines import RepeatedWarning

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ackstate.analysis.admin.tokens import Tokens

BODY_BYTES_MAX = 64 * 1024
# Below the time that a stopping server grants to requests, so that each gets our answer.
BODY_SECONDS_MAX = 4.0
WRONG_TOKEN_SECONDS_MAX = 4

NO_TOKEN = "no token"  # noqa: S105 - the label if no token is needed
WHO = "ackstate.who"
"""Key of the token's label in a request's scope."""

# They reveal nothing from the store.
OPEN_PATHS = frozenset({"/healthz", "/docs", "/openapi.json"})
_LOCAL_HOSTS = frozenset({"", "127.0.0.1", "localhost"})
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
_LENGTH_DIGITS_MAX = 20


@final
class Guard:
    """Refuses a wrong token, an encoded slash in the path, or too large a body; passes on all other requests.

    Only the answer to a wrong token is delayed, so a client that guesses does not delay others. The delay and the limit
    on connections per client, which count until they are answered, bound the guesses of a client.

    Bodies are read completely before they are passed on, so that their size is known even without ``Content-Length``.

    Args:
        app: Receives the accepted requests.
        tokens: The tokens of requests, except those for `OPEN_PATHS`. None if each process of this machine may use the
            server: then the peer must be known to be on it, which it is not behind a Unix socket, because a proxy may
            be there. And the Host must be this machine's. Otherwise a name controlled by an attacker could resolve to
            this machine, and a browser could reach it.
        wrong_token_seconds: Delay of the answer to a wrong token.
    """

    def __init__(self, app: ASGIApp, *, tokens: Tokens | None, wrong_token_seconds: float = 0) -> None:
        self._app = app
        self._tokens = tokens
        self._wrong_token_seconds = wrong_token_seconds
        self._wrong_tokens = RepeatedWarning()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with scope.get("state", {}).get("slot") or nullcontext():
            _use_origin_form(scope)
            answer = self._refusal(scope) or await self._handle(scope, receive, send)
            if answer is not None:
                await answer(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """Pass a complete request on, or return a refusal."""
        is_answered = False

        async def noted(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        try:
            if not self._is_authorized(scope):
                return await self._unauthorized(scope)
            if (answer := _unsuitable(scope)) is not None:
                return answer
            body = await _read_body(receive, scope)
            if not isinstance(body, bytes):
                return body
            await self._app(scope, _replay(body, receive), noted)
        except asyncio.CancelledError:
            # The server stops and cancels the request. uvicorn would answer with its own text, and log a traceback.
            if is_answered:
                raise
            return refusal(503, "the server is shutting down", headers={"Connection": "close"})
        return None

    def _is_authorized(self, scope: Scope) -> bool:
        """Identify the sender of a request, and return whether it is authorized."""
        scope[WHO] = NO_TOKEN
        if self._tokens is None or scope["path"] in OPEN_PATHS:
            return True
        scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        scope[WHO] = self._tokens.label_of(given.strip()) if scheme.lower() == b"bearer" else None
        return scope[WHO] is not None

    async def _unauthorized(self, scope: Scope) -> Response:
        if b"authorization" in dict(scope["headers"]):
            host, _ = scope.get("client") or ("a client", 0)
            self._wrong_tokens.log(f"a wrong token from {host}")
            await asyncio.sleep(self._wrong_token_seconds)
        return refusal(401, "the bearer token is missing or wrong", headers={"WWW-Authenticate": "Bearer"})

    def _refusal(self, scope: Scope) -> Response | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # A proxy may have used the other header: then the next bytes would be a smuggled request.
            return refusal(400, "both Content-Length and Transfer-Encoding are given", headers={"Connection": "close"})
        if self._tokens is None and not _is_loopback(scope.get("client")):
            reason = "without a token, the server answers only connections from 127.0.0.1 or ::1"
            return refusal(403, reason, headers={"Connection": "close"})
        if self._tokens is None and not _is_local(headers.get(b"host", b"")):
            return refusal(400, "Host must be 127.0.0.1 or localhost, because the server has no token")
        return None


def _unsuitable(scope: Scope) -> Response | None:
    # Once decoded, it would be indistinguishable from a slash that separates names.
    if b"%2f" in scope.get("raw_path", b"").lower():
        return refusal(400, "a slash in a name (%2F) is not supported")
    if scope["method"] == "POST" and _media_type(dict(scope["headers"])) != b"application/json":
        # A page of another origin can make a browser send other types without a preflight, but not this one.
        return refusal(415, "Content-Type must be application/json")
    return None


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


def _use_origin_form(scope: Scope) -> None:
    """Use the host of a target that is a whole URL instead of the header."""
    found = _ABSOLUTE.fullmatch(scope.get("raw_path", b""))
    if found is None:
        return
    host, path = found.groups()
    scope["raw_path"] = path or b"/"
    scope["path"] = unquote(scope["raw_path"].decode("ascii"))
    scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"host"] + [(b"host", host)]


def _media_type(headers: dict[bytes, bytes]) -> bytes:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


async def _read_body(receive: Receive, scope: Scope) -> bytes | Response:
    """Return the body, or a refusal."""
    too_large = refusal(413, f"the body is larger than {BODY_BYTES_MAX} bytes", headers={"Connection": "close"})
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if not length.isdigit() or len(length) > _LENGTH_DIGITS_MAX or int(length) > BODY_BYTES_MAX:
        return too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return refusal(400, "the connection was closed before the body was complete")
                body += message.get("body", b"")
                if len(body) > BODY_BYTES_MAX:
                    return too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        return refusal(408, f"the body did not arrive within {BODY_SECONDS_MAX:g} s", headers={"Connection": "close"})


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `Receive` that yields the body once, then the following messages."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
