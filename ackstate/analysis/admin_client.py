"""Reads and changes the delayed-delivery policies of the REST server, with the options and names of `pulsar-admin`.

Needs httpx, of the extra `admin`. httpx and other slow imports are deferred until a request is sent, because the
command line imports this module for each `--help`.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from ackstate.analysis.http_exchange import Answer, AnswerTooLongError, ExchangeError, HttpExchanges, Request
from ackstate.analysis.token_file import open_token_file
from ackstate.analysis.wording import printable
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

TOKEN_PLUGIN = "org.apache.pulsar.client.impl.auth.AuthenticationToken"  # noqa: S105 -- a class, no secret
DEFAULT_ADMIN_URL = "http://localhost:8080"

_PORTS = {"http": 80, "https": 443}
_ENTITY = re.compile(r"[-=:.\w]+", re.ASCII)
_TOKEN = re.compile(r"[!-~]+")
_TOKEN_FILE_BYTES_MAX = 64 * 1024
_POLICY_BYTES_MAX = 1024 * 1024
_CONFLICT = 409
_PAUSES_S = (0.01, 0.02, 0.04, 0.08)


class AdminError(AckStateError):
    """The server refused or could not be reached. The text is that of `pulsar-admin`, possibly several lines."""


class InvalidNameError(AdminError):
    """No topic or namespace that can be requested has this name; nothing was requested."""


class Origin(NamedTuple):
    """Scheme, host and port of a URL: servers are the same only if all three are equal."""

    scheme: str
    host: str
    port: int


def origin_of(url: str) -> Origin:
    """Return the origin of a URL of http or https; the host in lower case, without the brackets of IPv6.

    Raises:
        ValueError: It has no host, or an invalid port.
    """
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname or parts.port == 0:
        raise ValueError(f"the URL of the server must have a host and a valid port, got {url!r}")
    return Origin(parts.scheme, parts.hostname.rstrip("."), parts.port or _PORTS[parts.scheme])


@dataclass(frozen=True, slots=True)
class AdminServer:
    """The address of the server, and how requests are sent to it.

    Attributes:
        url: A URL of http or https, maybe with a path, without a query and a user.
        token: Sent as a bearer token; empty for none. Never shown.
        timeout_s: Limit of a whole exchange, from the look-up of the name to the last byte of the answer.
        trust_cert_path: Certificates to trust instead of the system's; empty for the system's.
        answer_bytes_max: A longer answer is refused; None for a limit that suits the resource.

    Raises:
        AdminError: The URL or the token is malformed.
    """

    url: str = DEFAULT_ADMIN_URL
    token: str = field(default="", repr=False)
    timeout_s: float = 60.0
    trust_cert_path: str = ""
    answer_bytes_max: int | None = None

    def __post_init__(self) -> None:
        if "@" in self.url:
            # Not shown: it may hold a password.
            raise AdminError("the URL of the server has a user or password: use --auth-params or --token-file instead")
        if not self.url.isprintable() or not _is_server(self.url):
            raise AdminError(f"the URL of the server must look like {DEFAULT_ADMIN_URL}, got {self.url!r}")
        if self.token and not _TOKEN.fullmatch(self.token):
            raise AdminError("the token has a character that no token has")

    @property
    def origin(self) -> Origin:
        """The scheme, the host and the port."""
        return origin_of(self.url)

    def call(
        self,
        method: Literal["GET", "POST", "DELETE"],
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> Any:
        """Send one request and return the JSON of the answer, None when it is empty.

        A POST or a DELETE that conflicts with another writer is sent again, a few times. Repeating is safe: an update
        names only the fields it changes, so the other writer's fields stay. A redirection is not followed.

        Args:
            method: The verb.
            path: Below the URL, percent-encoded, beginning with a slash.
            query: Parameters of the query.
            body: Sent as JSON; without it nothing is sent.

        Raises:
            AdminError: No answer arrived in time, or it reports a failure or is not JSON.
        """
        with self.exchanges() as exchanges:
            for pause_s in (*_PAUSES_S, None):
                answer = self.exchange(exchanges, method, path, query=query, body=body)
                if answer.status != _CONFLICT or method == "GET" or pause_s is None:
                    break
                time.sleep(pause_s)
        return _content(answer)

    def exchanges(self) -> HttpExchanges:
        """Return the connection pool; the caller closes it.

        Raises:
            AdminError: httpx is missing.
        """
        try:
            return HttpExchanges(self._trust)
        except ExchangeError as error:
            raise AdminError(str(error)) from None

    def exchange(
        self,
        exchanges: HttpExchanges,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> Answer:
        """Send one request and return the answer, with any status.

        Raises:
            AdminError: No complete answer arrived in time, it exceeds a limit, or the certificates cannot be read.
        """
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        deadline_s = time.monotonic() + self.timeout_s
        bytes_max = _POLICY_BYTES_MAX if self.answer_bytes_max is None else self.answer_bytes_max
        url = self.url.rstrip("/") + path
        try:
            return exchanges.send(Request(method, url, headers, query, body, deadline_s, bytes_max))
        except AnswerTooLongError as error:
            raise AdminError(str(error)) from None
        except ExchangeError as error:
            raise AdminError(f"Error connecting to: {self.url}: {error}") from None

    def _trust(self) -> ssl.SSLContext:
        return trusted_certificates(self.trust_cert_path)


def trusted_certificates(path: str) -> ssl.SSLContext:
    """Return the certificates of a file, or the system's if it is empty.

    Raises:
        AdminError: They cannot be read.
    """
    import ssl  # noqa: PLC0415

    try:
        return ssl.create_default_context(cafile=path or None)
    except OSError as error:
        raise AdminError(f"the certificates {path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of `pulsar-admin` that precede the command; None if an option was not given."""

    admin_url: str | None = None
    auth_plugin: str | None = None
    auth_params: str | None = field(default=None, repr=False)
    request_timeout_s: float = 60
    tls_trust_cert_path: str = ""

    def server(self) -> AdminServer:
        """Return the server that the options name.

        Raises:
            AdminError: An option is malformed, or the file of the token cannot be read.
        """
        if self.auth_plugin not in {None, "", TOKEN_PLUGIN}:
            raise AdminError(f"--auth-plugin {self.auth_plugin} is not supported: only {TOKEN_PLUGIN} is")
        if self.auth_plugin and not self.auth_params:
            raise AdminError(f"--auth-plugin {self.auth_plugin} needs --auth-params token:TOKEN or file:///PATH")
        return AdminServer(
            url=self.admin_url or DEFAULT_ADMIN_URL,
            token=_token(self.auth_params) if self.auth_params else "",
            timeout_s=self.request_timeout_s,
            trust_cert_path=self.tls_trust_cert_path,
        )


def namespace_path(namespace: str) -> str:
    """Return the path of a namespace `tenant/namespace` on the server.

    Raises:
        InvalidNameError: It is not of that form, or a name has a character that Pulsar does not allow.
    """
    parts = namespace.split("/")
    if len(parts) != 2 or not all(map(_is_entity, parts)):
        raise InvalidNameError(
            f"Invalid namespace format, expected tenant/namespace. namespace: {printable(namespace)}"
        )
    return "/admin/v2/namespaces/" + "/".join(map(_encoded, parts))


def topic_path(topic: str) -> str:
    """Return the path of a topic on the server.

    Raises:
        InvalidNameError: It has none of these forms, is not persistent, or names a cluster, as topics of Pulsar 1 did.
    """
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


def _is_server(url: str) -> bool:
    try:
        origin_of(url)
    except ValueError:
        return False
    return not {"?", "#", " ", "\\"} & {*url}


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
        token = _token_of_file(parameters)
    else:
        # Not shown: it may be a token.
        raise AdminError("--auth-params must be token:TOKEN or file:///PATH")
    if not _TOKEN.fullmatch(token):
        raise AdminError("--auth-params: the token is empty or has a character that no token has")
    return token


def _token_of_file(uri: str) -> str:
    parts = urlsplit(uri)
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise AdminError(f"--auth-params: {printable(uri)} is not of the form file:///PATH")
    try:
        with open_token_file(Path(unquote(parts.path))) as file:
            return file.read(_TOKEN_FILE_BYTES_MAX).decode("utf-8").strip()
    except (OSError, ValueError) as error:
        raise AdminError(f"--auth-params: {printable(uri)} cannot be read: {error}") from error


def _content(response: Answer) -> Any:
    """Return the JSON of an answer; raise `AdminError` if it is not JSON or the status is not a success."""
    try:
        content = json.loads(response.content) if response.content else None
        readable = True
    except (ValueError, RecursionError):
        content, readable = None, False
    if not response.is_success:
        reason = reason_of(content) or f"HTTP {response.status} {response.phrase}".rstrip()
        raise AdminError(f"{reason}\n\nReason: {reason}")
    if not readable:
        raise AdminError("the answer of the server is not JSON")
    return content


def reason_of(answer: Any) -> str:
    """Return the server's reason for a refusal, empty if there is none."""
    reason = answer.get("reason") if isinstance(answer, dict) else None
    return printable(reason) if isinstance(reason, str) else ""
