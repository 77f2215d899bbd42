"""`ackstate serve`. Web packages are imported when it runs, so that `--help` is fast and needs no extra."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import duration_option, path_argument
from ackstate.analysis.durations import Duration
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from ackstate.analysis.admin.tokens import Tokens

TOKEN_VARIABLE = "ACKSTATE_ADMIN_TOKEN"  # noqa: S105 - its name, not the token


def serve(
    store: Annotated[
        Path, typer.Option(metavar="DIR", parser=path_argument, help="A store's directory; created if it is missing.")
    ],
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65_535, help="The port to listen on; 0 is any free port.")
    ] = 8080,
    host: Annotated[str, typer.Option(metavar="H", help="Address to listen on; not 127.0.0.1 needs a token.")] = (
        "127.0.0.1"
    ),
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="F", parser=path_argument, help="Require a token in this file."),
    ] = None,
    header_timeout: Annotated[
        Duration,
        duration_option(plain_unit="s", whole="s", least="1s", help="Limit for the headers of a request."),
    ] = Duration(5_000),
    idle_timeout: Annotated[
        Duration,
        duration_option(plain_unit="s", whole="s", least="1s", help="Limit for an idle connection."),
    ] = Duration(5_000),
    answer_timeout: Annotated[
        Duration,
        duration_option(plain_unit="s", whole="s", least="1s", help="Limit for a client to read an answer."),
    ] = Duration(60_000),
    connections_per_client: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Most open connections of one address, an IPv6 /64; 0 for any number."),
    ] = 32,
    wrong_token_delay: Annotated[
        Duration,
        duration_option(plain_unit="s", whole="s", most="4s", help="Delay of the answer to a wrong token."),
    ] = Duration(1_000),
    conf: Annotated[
        Path | None,
        typer.Option(metavar="F", parser=path_argument, help="A broker.conf, with the defaults of all policies."),
    ] = None,
    topic_may_disable: Annotated[
        bool, typer.Option("--topic-may-disable", help="A topic may switch off a policy that its namespace enforces.")
    ] = False,
) -> None:
    """Serve the delay and ack-record policies of namespaces and topics over REST, as Pulsar's brokers do.

    It prints one line with its address when it is ready, and exits cleanly on
    SIGTERM and SIGINT. The page /docs documents the API.

    The bearer token is in a file or in ACKSTATE_ADMIN_TOKEN, never among the
    arguments, where every process could read it. Without one, only this
    machine can connect, and all its users can. A line of the file is a token,
    or a label, a blank and a token; a changed file takes effect at once.

    Standard error has a line for each change of a policy: the label of the token, the address, the field, and its value
    before and after.

    A topic may replace a delay or a maximum of its namespace by another, longer
    or shorter; to switch it off with a 0 it needs --topic-may-disable.

    A store on a disk is open in one process at a time: stop its broker first.
    """
    try:
        from ackstate.analysis.admin.connections import ConnectionLimits
        from ackstate.analysis.admin.resolve import BrokerPolicies
        from ackstate.analysis.admin.server import ServerSettings, serve
        from ackstate.analysis.admin.tokens import OneToken, TokenFile, checked_token
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        raise AckStateError(f"{package} is missing: install ackstate[admin]") from error
    from ackstate.cursor.pulsar_conf import read_properties

    tokens: Tokens | None = None
    if token_file is not None:
        tokens = TokenFile(token_file)
    elif TOKEN_VARIABLE in os.environ:
        token = checked_token(os.fsencode(os.environ[TOKEN_VARIABLE]), where=TOKEN_VARIABLE)
        tokens = OneToken(token, label=TOKEN_VARIABLE)
    try:
        properties = {} if conf is None else read_properties(conf)
        broker = BrokerPolicies.from_pulsar_conf(properties, topic_may_disable=topic_may_disable)
    except ValueError as error:
        raise AckStateError(f"{conf}: {error}") from error
    limits = ConnectionLimits(
        header_timeout.in_whole("s"), idle_timeout.in_whole("s"), answer_timeout.in_whole("s"), connections_per_client
    )
    settings = ServerSettings(store, port, host, tokens, broker, limits, wrong_token_delay.in_whole("s"))
    serve(settings, announce=console.show)
