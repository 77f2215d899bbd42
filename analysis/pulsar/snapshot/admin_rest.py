"""Reads from the admin REST interface of a Pulsar cluster. A request for a topic goes on to the broker that owns it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, final
from urllib.parse import urlsplit

from analysis.admin_client import AdminError, AdminServer, reason_of

if TYPE_CHECKING:
    from types import TracebackType

    import httpx

_REDIRECTS_MAX = 5
_ANSWER_BYTES_MAX = 256 * 1024 * 1024  # 24 bytes for each of the ranges, of some hundred cursors
_ADVICE = {401: "give a token with --token-file", 403: "the token's role may not read it"}


class RefusedError(AdminError):
    """The server answered, and not with what was asked for.

    Attributes:
        status: Of HTTP.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@final
class PulsarAdmin:
    """Keeps connections while it is open. Threads may share it."""

    def __init__(self, server: AdminServer) -> None:
        """Connect when something is read.

        Raises:
            AdminError: httpx is missing, or the certificates cannot be read.
        """
        self._server = replace(server, answer_bytes_max=_ANSWER_BYTES_MAX)
        self._clients: dict[str, httpx.Client] = {_scheme(server.url): server.client()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            client.close()

    def get(self, path: str) -> Any:
        """Return the JSON at a path, None if it is empty.

        Args:
            path: Below the server's URL, percent-encoded, beginning with a slash.

        Raises:
            RefusedError: The server answered with a status that is no success; the text names the path.
            AdminError: There was no answer in time, or one that is not JSON, or a redirection that leads nowhere.
        """
        content = self._content(path)
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError):
            raise AdminError(f"{self._server.url}{path}: the answer is not JSON") from None

    def get_text(self, path: str) -> str:
        """Return the text at a path. Raises as `get`."""
        return self._content(path).decode("utf-8", "replace").strip()

    def _content(self, path: str) -> bytes:
        server, below = self._server, path
        for _ in range(_REDIRECTS_MAX + 1):
            response, content = server.exchange(self._client_of(server), "GET", below)
            if not response.is_redirect:
                break
            server, below = _redirected(server, response)
        else:
            raise AdminError(f"{self._server.url}{path}: more than {_REDIRECTS_MAX} redirections")
        if not response.is_success:
            raise _refusal(f"{server.url}{path}", response, content)
        return content

    def _client_of(self, server: AdminServer) -> httpx.Client:
        scheme = _scheme(server.url)
        client = self._clients.get(scheme)
        if client is None:
            # Two threads may both make one; the one that is not kept has no connection yet.
            client = self._clients.setdefault(scheme, server.client())
        return client


def _redirected(server: AdminServer, response: httpx.Response) -> tuple[AdminServer, str]:
    """Return where another broker has it; the token goes there too, as of Pulsar's own client, but not unencrypted."""
    place = str(response.url.join(response.headers["Location"]))
    parts = urlsplit(place)
    if _scheme(server.url) == "https" and parts.scheme != "https":
        raise AdminError(f"{server.url}: redirects to {place}, which is not encrypted")
    below = parts.path + (f"?{parts.query}" if parts.query else "")
    return replace(server, url=f"{parts.scheme}://{parts.netloc}"), below


def _refusal(place: str, response: httpx.Response, content: bytes) -> RefusedError:
    status = response.status_code
    try:
        reason = reason_of(json.loads(content)) if content else ""
    except (ValueError, RecursionError):
        reason = ""
    text = f"{place}: HTTP {status} {response.reason_phrase}".rstrip()
    said = "; ".join(filter(None, (reason, _ADVICE.get(status, ""))))
    return RefusedError(f"{text}: {said}" if said else text, status)


def _scheme(url: str) -> str:
    return urlsplit(url).scheme
