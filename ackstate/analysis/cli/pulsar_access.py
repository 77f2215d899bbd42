"""Options and connections of the commands that read a cluster of Pulsar over its admin interface."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from ackstate.analysis.admin_client import AdminServer
from ackstate.analysis.cli.admin_access import check_extra, read_token
from ackstate.analysis.cli.options import duration_option
from ackstate.analysis.durations import Duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.analysis.pulsar.snapshot.admin_rest import PulsarAdmin
    from ackstate.analysis.pulsar.snapshot.request_rate import RequestRate

ANSWER_MIB = 64

TenantOption: TypeAlias = Annotated[list[str] | None, typer.Option(metavar="T", help="All topics of a tenant.")]
NamespaceOption: TypeAlias = Annotated[list[str] | None, typer.Option(metavar="T/N", help="All topics of a namespace.")]
TopicOption: TypeAlias = Annotated[list[str] | None, typer.Option(metavar="TOPIC", help="A topic, all partitions.")]
TokenFileOption: TypeAlias = Annotated[Path | None, typer.Option(metavar="FILE", help="A file that holds a token.")]
TokenHostOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST[:PORT]", help="Send the token there too if redirected; else only to URL."),
]
TrustOption: TypeAlias = Annotated[
    str, typer.Option(metavar="FILE", help="Trust these certificates instead of the system's.")
]
RequestTimeoutOption: TypeAlias = Annotated[
    Duration, duration_option(plain_unit="s", least="1s", most="1h", help="How long each answer may take.")
]
AnswerMibOption: TypeAlias = Annotated[
    int, typer.Option(metavar="MIB", min=1, max=2_048, help="Refuse a longer answer.")
]
RequestRateOption: TypeAlias = Annotated[
    float, typer.Option(metavar="N", min=0.1, max=10_000, help="Most requests per second to the cluster.")
]


def admin_server(
    url: str,
    token_file: Path | None,
    *,
    timeout: Duration,
    trust_cert_path: str,
    answer_mib_max: int,
) -> AdminServer:
    """Return the server that the options name.

    Raises:
        AckStateError: The URL or the token is malformed.
        OSError: The token cannot be read.
    """
    token = read_token(token_file)
    return AdminServer(url, token, timeout.seconds, trust_cert_path, answer_bytes_max=answer_mib_max * 1024 * 1024)


def open_admin(server: AdminServer, token_hosts: Sequence[str] | None, rate: RequestRate | None = None) -> PulsarAdmin:
    """Return a connection pool; the caller closes it.

    Raises:
        AckStateError: A token host is malformed, or a package is missing.
    """
    check_extra()
    from ackstate.analysis.pulsar.snapshot.admin_rest import PulsarAdmin

    return PulsarAdmin(server, token_hosts=token_hosts or [], rate=rate)
