"""Reads from the admin REST interface of a Pulsar cluster; follows redirections to the broker that owns a topic."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, final
from urllib.parse import urljoin, urlsplit

from ackstate.analysis.admin_client import AdminError, Origin, origin_of, reason_of
from ackstate.analysis.pulsar.snapshot.internal_stats import read_json

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType

    from ackstate.analysis.admin_client import AdminServer
    from ackstate.analysis.http_exchange import Answer
    from ackstate.analysis.pulsar.snapshot.request_rate import RequestRate

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""Longest accepted answer: at 20 bytes a range, 3,000,000 ranges of a topic's cursors."""

_REDIRECTS_MAX = 5
_REDIRECTIONS = frozenset({301, 302, 303, 307, 308})
_UNAUTHORIZED, _FORBIDDEN = 401, 403
_NO_ROLE = "the role is not allowed to read it"


class RefusedError(AdminError):
    """The server refused the request.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@final
class PulsarAdmin:
    """A connection pool to a cluster. Threads may share it.

    The token is sent to the host and port of the server's URL and to those of `token_hosts`. A redirection to another
    place is followed without it, and later redirections do not get it back. None is followed from https to http.
    """

    def __init__(
        self, server: AdminServer, *, token_hosts: Collection[str] = (), rate: RequestRate | None = None
    ) -> None:
        """Prepare; connections are opened by the first request.

        Args:
            server: The server of the first request.
            token_hosts: ``HOST:PORT``, or ``HOST`` for the port of the server's URL.
            rate: Limits the requests per second, including those after a redirection; None for no limit.

        Raises:
            AdminError: httpx is missing, or a token host is malformed.
        """
        if server.answer_bytes_max is None:
            server = replace(server, answer_bytes_max=ANSWER_BYTES_MAX)
        self._server = server
        self._rate = rate
        self._trusted = {server.origin[1:], *(_token_host(host, server.origin) for host in token_hosts)}
        self._exchanges = server.exchanges()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchanges.close()

    def get(self, path: str) -> Any:
        """Return the JSON at a path, None if it is empty.

        Args:
            path: Path below the server's URL, percent-encoded, starting with a slash.

        Raises:
            RefusedError: The status is not a success; the message names the path.
            AdminError: No answer arrived in time, or it is not JSON, or is an invalid redirection.
        """
        content = self._content(path)
        try:
            return read_json(content) if content else None
        except (ValueError, RecursionError):
            raise AdminError(
                f"{self._server.url}{path}: the answer is not JSON, or has a number of more than 64 bits"
            ) from None

    def get_text(self, path: str) -> str:
        """Return the text at a path. Raises as `get`."""
        return self._content(path).decode("utf-8", "replace").strip()

    def _content(self, path: str) -> bytes:
        server, below = self._server, path
        self._wait()
        # All redirections of a request share one deadline.
        deadline_s = time.monotonic() + server.timeout_s
        for _ in range(_REDIRECTS_MAX + 1):
            server = replace(server, timeout_s=max(deadline_s - time.monotonic(), 0))
            answer = server.exchange(self._exchanges, "GET", below)
            if answer.status not in _REDIRECTIONS:
                break
            server, below = self._redirected(server, below, answer)
            self._wait()
        else:
            raise AdminError(f"{self._server.url}{path}: more than {_REDIRECTS_MAX} redirections")
        if not answer.is_success:
            raise self._refusal(server, below, answer)
        return answer.content

    def _wait(self) -> None:
        if self._rate is not None:
            self._rate.wait()

    def _redirected(self, server: AdminServer, below: str, answer: Answer) -> tuple[AdminServer, str]:
        """Return the server and the path of a redirection, with the token only if it may be sent there."""
        asked = f"{server.url.rstrip('/')}{below}"
        if not answer.location:
            raise AdminError(f"{asked}: HTTP {answer.status} without a Location")
        place = _place(asked, answer.location)
        target = origin_of(place)
        if server.origin.scheme == "https" and target.scheme != "https":
            raise AdminError(f"{asked}: redirects to {place}, which is not encrypted")
        parts = urlsplit(place)
        token = server.token if target[1:] in self._trusted else ""
        found = replace(server, url=f"{parts.scheme}://{parts.netloc}", token=token)
        return found, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def _refusal(self, server: AdminServer, below: str, answer: Answer) -> RefusedError:
        try:
            reason = reason_of(json.loads(answer.content)) if answer.content else ""
        except (ValueError, RecursionError):
            reason = ""
        text = f"{server.url.rstrip('/')}{below}: HTTP {answer.status} {answer.phrase}".rstrip()
        said = "; ".join(filter(None, (reason, self._advice(server, answer.status))))
        return RefusedError(f"{text}: {said}" if said else text, answer.status)

    def _advice(self, server: AdminServer, status: int) -> str:
        if status not in {_UNAUTHORIZED, _FORBIDDEN}:
            return ""
        if not self._server.token:
            return "give a token with --token-file" if status == _UNAUTHORIZED else _NO_ROLE
        if not server.token:
            _, host, port = server.origin
            shown = f"[{host}]" if ":" in host else host
            return f"the token was not sent there: to allow it, add --token-host {shown}:{port}"
        return (
            "the token was not accepted: wrong or expired" if status == _UNAUTHORIZED else f"the token's {_NO_ROLE[4:]}"
        )


def _place(asked: str, location: str) -> str:
    """Return the target of a redirection; error messages do not show a user or a password."""
    if not location.isprintable() or "\\" in location or len(location) > 8_192:
        raise AdminError(f"{asked}: redirects to a malformed place")
    try:
        place = urljoin(asked, location).partition("#")[0]
        if "@" in urlsplit(place).netloc:
            raise AdminError(f"{asked}: redirects to a place with a user or password, which is not followed")
        origin_of(place)
    except ValueError:
        raise AdminError(f"{asked}: redirects to {location[:200]!r}, which is not a URL of http or https") from None
    return place


def _token_host(text: str, named: Origin) -> tuple[str, int]:
    """Return the host and the port of ``HOST`` or ``HOST:PORT``, or raise `AdminError`."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    is_whole = text.isprintable() and not {"/", "?", "#", "@", " ", "\\", "*"} & {*text}
    if not host or port == 0 or not is_whole:
        raise AdminError(f"--token-host must be HOST or HOST:PORT, got {text!r}")
    return host.rstrip("."), port or named.port
