"""What every request must pass before anything else sees it: whose it is, how it is addressed, how large it is."""

from __future__ import annotations

import asyncio
import hmac
import re
from typing import TYPE_CHECKING, final

from ackstate.errors import AckStateError
from analysis.admin.answers import refusal

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = 64 * 1024
# Below the time that a server that is told to end gives to requests: each gets an answer of ours.
BODY_SECONDS_MAX = 4.0

# They tell nothing that is in the store.
OPEN_PATHS = frozenset({"/healthz", "/docs", "/openapi.json"})
_LOCAL_HOSTS = frozenset({"", "127.0.0.1", "localhost"})
_TOKEN = re.compile(rb"[\x21-\x7e]+")
_TOKEN_BYTES_MAX = 8 * 1024
_FILE_BYTES_MAX = 64 * 1024
_LENGTH_DIGITS_MAX = 20


def read_token(path: Path) -> bytes:
    """Return the token that a file holds; blanks and line ends around it do not count.

    Raises:
        AckStateError: There is none in it.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return checked_token(file.read(_FILE_BYTES_MAX + 1), where=str(path))


def checked_token(text: bytes, *, where: str) -> bytes:
    """Return a token without the blanks and line ends around it; the error never shows it.

    Raises:
        AckStateError: It is empty, too long, or has characters that no header carries.
    """
    token = text.strip()
    if len(text) > _FILE_BYTES_MAX or len(token) > _TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise AckStateError(f"{where} holds no token: one word of visible ASCII characters, up to {_TOKEN_BYTES_MAX}")
    return token


@final
class Guard:
    """Refuses what has the wrong token, an encoded slash in its path, or too large a body; hands on the rest.

    Bodies are read whole before they are handed on, so that their size is known without ``Content-Length`` too.

    Args:
        app: Gets what is not refused.
        token: What requests must bear, except those for `OPEN_PATHS`. None if whoever reaches the server may use it:
            then the Host must be this machine's, because a name that somebody else controls may resolve to it and would
            make a browser the way in.
    """

    def __init__(self, app: ASGIApp, *, token: bytes | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._refusal(scope) or await self._handle(scope, receive, send)
        if answer is not None:
            await answer(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        """Hand a request on whole, or return what to answer instead."""
        is_answered = False

        async def noted(message: Message) -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        try:
            body = await _read_body(receive, scope)
            if not isinstance(body, bytes):
                return body
            await self._app(scope, _replay(body, receive), noted)
        except asyncio.CancelledError:
            # The server ends and waits no longer. It would answer with a text of its own, and log a traceback.
            if is_answered:
                raise
            return refusal(503, "the server is shutting down", headers={"Connection": "close"})
        return None

    def _refusal(self, scope: Scope) -> Response | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._token is None:
            if not _is_local(headers.get(b"host", b"")):
                return refusal(
                    400, "Host is not this machine's: without a token only 127.0.0.1 and localhost are served"
                )
        elif scope["path"] not in OPEN_PATHS and not _bears(headers.get(b"authorization", b""), self._token):
            return refusal(401, "the bearer token is missing or wrong", headers={"WWW-Authenticate": "Bearer"})
        # Once decoded it could not be told from a slash that separates names.
        if b"%2f" in scope.get("raw_path", b"").lower():
            return refusal(400, "a slash in a name (%2F) is not supported")
        if scope["method"] == "POST" and _media_type(headers) != b"application/json":
            # A page of another origin can make a browser send other types unasked, but not this one.
            return refusal(415, "Content-Type is not application/json")
        return None


def _is_local(host: bytes) -> bool:
    name = re.sub(r":[0-9]*\Z", "", host.decode("latin-1"))
    return name.lower() in _LOCAL_HOSTS


def _bears(authorization: bytes, token: bytes) -> bool:
    scheme, _, given = authorization.partition(b" ")
    return hmac.compare_digest(given.strip(), token) and scheme.lower() == b"bearer"


def _media_type(headers: dict[bytes, bytes]) -> bytes:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()


async def _read_body(receive: Receive, scope: Scope) -> bytes | Response:
    """Return the body, or what to answer instead."""
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
    """Return a `Receive` that gives the body once, then what comes after it."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
