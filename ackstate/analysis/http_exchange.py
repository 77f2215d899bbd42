"""Sends HTTP requests, each within one deadline and a limit of bytes. Needs httpx, of the extra `admin`.

A timeout of each read does not bound an exchange: a server may send a byte of its headers a second, or `100 Continue`
for ever. So requests run on an event loop of their own, which cancels them at their deadline wherever they are: at the
look-up of the name, the connection, TLS, the headers or the content.

Content is read as it comes. It is requested without an encoding, and any other is refused: a few KB of nested gzip
decode to gigabytes.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

from ackstate.analysis.wording import printable
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    import httpx

_PLAIN_ENCODINGS = {"", "identity"}


class ExchangeError(AckStateError):
    """There was no complete answer. The text is one line, without the URL."""


class AnswerTooLongError(ExchangeError):
    """The answer takes too long, has too many bytes, or an encoding that was not requested."""


class Request(NamedTuple):
    """One request.

    Attributes:
        method: The verb.
        url: Where, without a user.
        headers: Sent beside those of HTTP itself.
        query: Parameters added to the URL.
        body: Sent as JSON; None for nothing.
        deadline_s: When the whole exchange must be done, on the clock of `time.monotonic`.
        bytes_max: The longest content that is read.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    query: Mapping[str, str] | None
    body: Mapping[str, object] | None
    deadline_s: float
    bytes_max: int


class Answer(NamedTuple):
    """The answer of a server, of any status.

    Attributes:
        status: The HTTP status.
        phrase: The reason phrase behind the status.
        location: The target of a redirection, as received; None if there is none.
        content: The whole content; empty with an encoding if the status is not a success.
    """

    status: int
    phrase: str
    location: str | None
    content: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is one of success."""
        return 200 <= self.status < 300


@final
class HttpExchanges:
    """A pool of connections. Threads may share it.

    Args:
        trust: Returns the certificates to trust; called once, before the first request by https.

    Raises:
        ExchangeError: httpx is missing.
    """

    def __init__(self, trust: Callable[[], ssl.SSLContext]) -> None:
        try:
            import httpx  # noqa: PLC0415
            from anyio.from_thread import start_blocking_portal  # noqa: PLC0415
        except ImportError as error:
            raise ExchangeError(f"{error.name} is missing: install ackstate[admin]") from error
        self._httpx = httpx
        self._trust = trust
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())
        # Only the loop's thread changes it.
        self._clients: dict[bool, httpx.AsyncClient] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; may be called again."""
        with self._stack:
            for client in self._clients.values():
                self._portal.call(client.aclose)
            self._clients.clear()

    def send(self, request: Request) -> Answer:
        """Send a request and return the answer. A redirection is an answer like any other.

        Raises:
            AnswerTooLongError: The answer exceeds a limit.
            ExchangeError: There is no connection, or the answer is not HTTP.
        """
        return self._portal.call(self._send, request)

    async def _send(self, request: Request) -> Answer:
        from anyio import fail_after  # noqa: PLC0415

        reading = False
        try:
            with fail_after(max(request.deadline_s - time.monotonic(), 0)):
                async with self._client(request.url).stream(
                    request.method, request.url, params=request.query, json=request.body, headers=dict(request.headers)
                ) as response:
                    reading = True
                    return await _whole(response, request.bytes_max)
        except TimeoutError:
            if reading:
                raise AnswerTooLongError("the answer of the server did not end in time") from None
            raise ExchangeError("timed out") from None
        except (self._httpx.HTTPError, self._httpx.InvalidURL, UnicodeError) as error:
            # A host name that cannot be encoded is a `UnicodeError`.
            raise ExchangeError(_why(error)) from None

    def _client(self, url: str) -> httpx.AsyncClient:
        import ssl  # noqa: PLC0415

        is_encrypted = self._httpx.URL(url).scheme == "https"
        if is_encrypted not in self._clients:
            # Proxies, `.netrc` and certificates of the environment are ignored, as in Pulsar's client.
            self._clients[is_encrypted] = self._httpx.AsyncClient(
                timeout=None,
                trust_env=False,
                # Without certificates nothing is trusted; reading the system's takes 30 ms.
                verify=self._trust() if is_encrypted else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
                headers={"Accept-Encoding": "identity"},
            )
        return self._clients[is_encrypted]


async def _whole(response: httpx.Response, bytes_max: int) -> Answer:
    status, phrase, location = response.status_code, response.reason_phrase, response.headers.get("Location")
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _PLAIN_ENCODINGS:
        if response.is_success:
            raise AnswerTooLongError(f"the answer of the server has the encoding {encoding!r}, which was not requested")
        return Answer(status, phrase, location, b"")
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > bytes_max:
            raise AnswerTooLongError(f"the answer of the server is over {bytes_max} bytes")
    return Answer(status, phrase, location, bytes(content))


def _why(error: BaseException) -> str:
    """Return the first cause of an error: the library's own message may only report that it failed."""
    for each in _causes(error):
        if isinstance(each, OSError) and each.errno is not None:
            # The event loop words a refused connection differently from the system.
            is_connection = isinstance(each, ConnectionError)
            return f"[Errno {each.errno}] {os.strerror(each.errno)}" if is_connection else printable(str(each))
    return printable(str(error)) or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[Any] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        error = inner or error.__cause__ or error.__context__
