"""The client of the admin REST interface of a Pulsar cluster or of `ackstate serve`. Needs httpx, of the extra `admin`.

Certificates are always checked. Content is requested without an encoding, and any other is refused: a few KB of nested
gzip decode to gigabytes. Slow imports are deferred until a request is sent, because the command line imports this
module for each `--help`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Self, final
from urllib.parse import quote, unquote, urljoin, urlsplit

from ackstate.analysis.wording import printable
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Collection, Mapping

    import httpx


_LOG = logging.getLogger(__name__)
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_TOKEN_BYTES_MAX = 64 * 1024


def read_token(path: Path) -> str:
    """Return the token in a file, without the blanks around it; error messages never contain it.

    A warning is logged if anyone but the file's owner may read or change it. A pipe, as a shell creates for
    ``<(command)``, is read without a warning.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_mode & _OTHERS:
            mode = stat.S_IMODE(found.st_mode)
            _LOG.warning("%s: the mode of a token file must be 0600, got %04o: others can use the token", path, mode)
        content = file.read(_TOKEN_BYTES_MAX + 1)
    token = content.strip().decode("latin-1")
    if len(content) > _TOKEN_BYTES_MAX or not _TOKEN.fullmatch(token):
        raise AckStateError(f"{path}: expected a token, which is one word of ASCII")
    return token


TOKEN_PLUGIN = "org.apache.pulsar.client.impl.auth.AuthenticationToken"  # noqa: S105 -- a class, no secret
DEFAULT_ADMIN_URL = "http://localhost:8080"

_PORTS = {"http": 80, "https": 443}
_ENTITY = re.compile(r"[-=:.\w]+", re.ASCII)
_TOKEN = re.compile(r"[!-~]+")
_POLICY_BYTES_MAX = 1024 * 1024
_PAUSES_S = (0.01, 0.02, 0.04, 0.08)  # after a conflict
_REDIRECTS_MAX = 5
_REDIRECTIONS = frozenset({301, 302, 303, 307, 308})
_UNAUTHORIZED, _FORBIDDEN, _CONFLICT = 401, 403, 409
_NO_ROLE = "the role is not allowed to read it"
_LATE = "the answer of the server did not end in time"


class AdminError(AckStateError):
    """The server refused or could not be reached. The text is that of `pulsar-admin`, possibly several lines."""


class InvalidNameError(AdminError):
    """No topic or namespace that can be requested has this name; nothing was requested."""


class RefusedError(AdminError):
    """The server refused the request, with an HTTP status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def origin_of(url: str) -> tuple[str, str, int]:
    """Return scheme, host and port of a URL of http or https; the host in lower case, without the brackets of IPv6."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname or parts.port == 0:
        raise ValueError(f"the URL of the server must have a host and a valid port, got {url!r}")
    return parts.scheme, parts.hostname.rstrip("."), parts.port or _PORTS[parts.scheme]


@dataclass(frozen=True, slots=True)
class AdminServer:
    """The address of the server, and how requests are sent to it."""

    url: str = DEFAULT_ADMIN_URL  # of http or https, maybe with a path, without a query and a user
    token: str = field(default="", repr=False)  # sent as a bearer token; empty for none
    timeout_s: float = 60.0  # of each step of an exchange, and of all its redirections and content
    trust_cert_path: str = ""  # certificates to trust instead of the system's
    answer_bytes_max: int = 64 * 1024 * 1024  # at 20 bytes a range, 3,000,000 ranges of a topic's cursors

    def __post_init__(self) -> None:
        if "@" in self.url:
            # Not shown: it may hold a password.
            raise AdminError("the URL of the server has a user or password: use --auth-params or --token-file instead")
        try:
            origin_of(self.url)
        except ValueError:
            is_server = False
        else:
            is_server = self.url.isprintable() and not {"?", "#", " ", "\\"} & {*self.url}
        if not is_server:
            raise AdminError(f"the URL of the server must look like {DEFAULT_ADMIN_URL}, got {self.url!r}")
        if self.token and not _TOKEN.fullmatch(self.token):
            raise AdminError("the token has a character that no token has")

    @property
    def origin(self) -> tuple[str, str, int]:
        """The scheme, the host and the port."""
        return origin_of(self.url)

    def call(
        self,
        method: Literal["GET", "POST", "DELETE"],
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | int | None = None,
    ) -> Any:
        """Send one request and return the JSON of the answer, None when it is empty. A redirection is not followed.

        A POST or a DELETE that conflicts with another writer is sent again, a few times. Repeating is safe: an update
        names only the fields it changes, so the other writer's fields stay.
        """
        with PulsarAdmin(self) as admin:
            for pause_s in (*_PAUSES_S, None):
                answer, content = admin.exchange(self, method, path, query=query, body=body)
                if answer.status_code != _CONFLICT or method == "GET" or pause_s is None:
                    break
                time.sleep(pause_s)
        if not answer.is_success:
            reason = _reason_of(content) or f"HTTP {answer.status_code} {answer.reason_phrase}".rstrip()
            raise AdminError(f"{reason}\n\nReason: {reason}")
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError):
            raise AdminError("the answer of the server is not JSON") from None


@final
class PulsarAdmin:
    """A connection pool to a cluster. Threads may share it.

    Each request waits for its turn among `requests_per_second`, 0 for no limit, also after a redirection, and is
    counted. The token is sent to the host and port of the server's URL and to those of `token_hosts`, each
    ``HOST:PORT``, or ``HOST`` for the port of the URL. A redirection to another place is followed without it, and later
    redirections do not get it back. None is followed from https to http.
    """

    def __init__(
        self, server: AdminServer, *, token_hosts: Collection[str] = (), requests_per_second: float = 0
    ) -> None:
        try:
            import httpx  # noqa: PLC0415
        except ImportError as error:
            raise AdminError(f"{error.name} is missing: install ackstate[admin]") from error
        self._httpx = httpx
        self._server = server
        self._trusted = {server.origin[1:], *(_token_host(host, server.origin[2]) for host in token_hosts)}
        self._gap_s = 1 / requests_per_second if requests_per_second else 0.0
        self._next_s = 0.0
        self.request_count = 0
        self._lock = Lock()
        self._clients: dict[str, httpx.Client] = {}  # by scheme

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for client in self._clients.values():
            client.close()

    def get(self, path: str) -> Any:
        """Return the JSON at a path, None if it is empty.

        The path is below the server's URL, percent-encoded, and starts with a slash.
        """
        content = self._content(path)
        try:
            return json.loads(content, parse_int=_long) if content else None
        except (ValueError, RecursionError):
            raise AdminError(
                f"{self._server.url}{path}: the answer is not JSON, or has a number of more than 64 bits"
            ) from None

    def get_text(self, path: str) -> str:
        """Return the text at a path. Raises as `get`."""
        return self._content(path).decode("utf-8", "replace").strip()

    def _content(self, path: str) -> bytes:
        server, below = self._server, path
        # All redirections of a request share one deadline.
        deadline_s = time.monotonic() + server.timeout_s
        for _ in range(_REDIRECTS_MAX + 1):
            self._wait()
            timed = replace(server, timeout_s=max(deadline_s - time.monotonic(), 0))
            answer, content = self.exchange(timed, "GET", below)
            if answer.status_code not in _REDIRECTIONS:
                break
            server, below = self._redirected(server, below, answer)
        else:
            raise AdminError(f"{self._server.url}{path}: more than {_REDIRECTS_MAX} redirections")
        if not answer.is_success:
            raise self._refusal(server, below, answer, _reason_of(content))
        return content

    def _wait(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            at_s = max(self._next_s, now_s)
            self._next_s = at_s + self._gap_s
            self.request_count += 1
        time.sleep(at_s - now_s)

    def exchange(
        self,
        server: AdminServer,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | int | None = None,
    ) -> tuple[httpx.Response, bytes]:
        """Send one request and return the answer, with any status, and its content, empty if it is encoded."""
        url, is_reading = server.url.rstrip("/") + path, False
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {server.token}"} if server.token else {})
        deadline_s = time.monotonic() + server.timeout_s
        try:
            with self._client(url).stream(
                method, url, params=query, json=body, headers=headers, timeout=server.timeout_s
            ) as response:
                is_reading = True
                return response, _content(response, server.answer_bytes_max, deadline_s)
        except self._httpx.TimeoutException:
            if is_reading:
                raise AdminError(_LATE) from None
            why = "timed out"
        except (self._httpx.HTTPError, self._httpx.InvalidURL, UnicodeError) as error:
            # A host name that cannot be encoded is a `UnicodeError`.
            why = _why(error)
        raise AdminError(f"Error connecting to: {server.url}: {why}")

    def _client(self, url: str) -> httpx.Client:
        import ssl  # noqa: PLC0415

        scheme = urlsplit(url).scheme
        with self._lock:
            if scheme not in self._clients:
                # Without certificates nothing is trusted; reading the system's takes 30 ms.
                is_encrypted = scheme == "https"
                trust = (
                    trusted_certificates(self._server.trust_cert_path)
                    if is_encrypted
                    else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                )
                # Proxies, `.netrc` and certificates of the environment are ignored, as in Pulsar's client.
                self._clients[scheme] = self._httpx.Client(
                    trust_env=False, verify=trust, headers={"Accept-Encoding": "identity"}
                )
            return self._clients[scheme]

    def _redirected(self, server: AdminServer, below: str, answer: httpx.Response) -> tuple[AdminServer, str]:
        """Return the server and the path of a redirection, with the token only if it may be sent there."""
        asked = f"{server.url.rstrip('/')}{below}"
        location = answer.headers.get("Location")
        if not location:
            raise AdminError(f"{asked}: HTTP {answer.status_code} without a Location")
        place = _place(asked, location)
        target = origin_of(place)
        if server.origin[0] == "https" and target[0] != "https":
            raise AdminError(f"{asked}: redirects to {place}, which is not encrypted")
        parts = urlsplit(place)
        token = server.token if target[1:] in self._trusted else ""
        found = replace(server, url=f"{parts.scheme}://{parts.netloc}", token=token)
        return found, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def _refusal(self, server: AdminServer, below: str, answer: httpx.Response, reason: str) -> RefusedError:
        status = answer.status_code
        text = f"{server.url.rstrip('/')}{below}: HTTP {status} {answer.reason_phrase}".rstrip()
        said = "; ".join(filter(None, (reason, self._advice(server, status))))
        return RefusedError(f"{text}: {said}" if said else text, status)

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


def _token_host(text: str, default_port: int) -> tuple[str, int]:
    """Return the host and the port of ``HOST`` or ``HOST:PORT``, or raise `AdminError`."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    is_whole = text.isprintable() and not {"/", "?", "#", "@", " ", "\\", "*"} & {*text}
    if not host or port == 0 or not is_whole:
        raise AdminError(f"--token-host must be HOST or HOST:PORT, got {text!r}")
    return host.rstrip("."), port or default_port


def _content(response: httpx.Response, bytes_max: int, deadline_s: float) -> bytes:
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in {"", "identity"}:
        if response.is_success:
            raise AdminError(f"the answer of the server has the encoding {encoding!r}, which was not requested")
        return b""
    content = bytearray()
    for chunk in response.iter_raw():
        content += chunk
        if len(content) > bytes_max:
            raise AdminError(f"the answer of the server is over {bytes_max} bytes")
        if time.monotonic() > deadline_s:
            raise AdminError(_LATE)
    return bytes(content)


def _why(error: BaseException) -> str:
    """Return the first cause of an error: the library's own message may only report that it failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            is_connection = isinstance(cause, ConnectionError)
            return f"[Errno {cause.errno}] {os.strerror(cause.errno)}" if is_connection else printable(str(cause))
        cause = cause.__cause__ or cause.__context__
    return printable(str(error)) or type(error).__name__


def _long(text: str) -> int:
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise ValueError("a number of more than 64 bits")
    return number


def trusted_certificates(path: str) -> ssl.SSLContext:
    """Return the certificates of a file, or the system's if it is empty."""
    import ssl  # noqa: PLC0415

    try:
        return ssl.create_default_context(cafile=path or None)
    except OSError as error:
        raise AdminError(f"the certificates {path} cannot be read: {error}") from error


def server_of(
    url: str | None, auth_plugin: str | None, auth_params: str | None, timeout_s: float, trust_cert_path: str
) -> AdminServer:
    """Return the server that the options of `pulsar-admin` name, None if an option was not given."""
    if auth_plugin not in {None, "", TOKEN_PLUGIN}:
        raise AdminError(f"--auth-plugin {auth_plugin} is not supported: only {TOKEN_PLUGIN} is")
    if auth_plugin and not auth_params:
        raise AdminError(f"--auth-plugin {auth_plugin} needs --auth-params token:TOKEN or file:///PATH")
    token = _token(auth_params) if auth_params else ""
    return AdminServer(url or DEFAULT_ADMIN_URL, token, timeout_s, trust_cert_path, answer_bytes_max=_POLICY_BYTES_MAX)


def namespace_path(namespace: str) -> str:
    """Return the path of a namespace `tenant/namespace` on the server."""
    parts = namespace.split("/")
    if len(parts) != 2 or not all(map(_is_entity, parts)):
        raise InvalidNameError(
            f"Invalid namespace format, expected tenant/namespace. namespace: {printable(namespace)}"
        )
    return "/admin/v2/namespaces/" + "/".join(map(_encoded, parts))


def topic_path(topic: str) -> str:
    """Return the path of a topic on the server."""
    domain, separator, rest = topic.partition("://")
    if separator and domain != "persistent":
        raise InvalidNameError(f"Need to provide a persistent topic name: {printable(topic)}")
    parts = (rest if separator else topic).split("/")
    if not separator and len(parts) == 1:
        parts = ["public", "default", *parts]
    if len(parts) != 3 or not all(map(_is_entity, parts[:2])) or parts[2] in {"", ".", ".."}:
        raise InvalidNameError(
            f"Invalid topic name '{printable(topic)}', it should be in the format of "
            "persistent://<tenant>/<namespace>/<topic>, <tenant>/<namespace>/<topic> or <topic>"
        )
    return "/admin/v2/persistent/" + "/".join(map(_encoded, parts))


def _is_entity(name: str) -> bool:
    """Return whether a name is valid; "." and ".." would be steps in a path."""
    return _ENTITY.fullmatch(name) is not None and name not in {".", ".."}


def _encoded(name: str) -> str:
    try:
        return quote(name, safe="")
    except UnicodeEncodeError:
        raise InvalidNameError(f"{printable(name)} is not text") from None


def _token(parameters: str) -> str:
    """Read a token as Pulsar's plugin does: ``token:`` and the token, or the content of a ``file:``."""
    if parameters.startswith("token:"):
        token = parameters.removeprefix("token:")
    elif parameters.startswith("file:"):
        parts = urlsplit(parameters)
        if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
            raise AdminError(f"--auth-params: {printable(parameters)} is not of the form file:///PATH")
        try:
            token = read_token(Path(unquote(parts.path)))
        except (OSError, ValueError, AckStateError) as error:
            raise AdminError(f"--auth-params: {printable(parameters)} cannot be read: {error}") from error
    else:
        # Not shown: it may be a token.
        raise AdminError("--auth-params must be token:TOKEN or file:///PATH")
    if not _TOKEN.fullmatch(token):
        raise AdminError("--auth-params: the token is empty or has a character that no token has")
    return token


def _reason_of(content: bytes) -> str:
    """Return the server's reason for a refusal, empty if there is none."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        return ""
    reason = answer.get("reason") if isinstance(answer, dict) else None
    return printable(reason) if isinstance(reason, str) else ""
