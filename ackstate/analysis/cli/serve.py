"""`ackstate serve`. Web packages are imported when it runs, so that `--help` is fast and needs no extra."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ackstate.analysis.admin_client import read_token
from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import path_argument
from ackstate.errors import AckStateError

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
    SIGTERM and SIGINT. /openapi.json describes the API.

    The bearer token is in a file or in ACKSTATE_ADMIN_TOKEN, never among the
    arguments, where every process could read it. Without one, only this
    machine can connect, and all its users can. Clients that you do not trust
    belong behind a reverse proxy, which bounds their connections.

    Standard error has a line for each change of a policy: the address, the field, and its value before and after.

    A topic may replace a delay or a maximum of its namespace by another, longer
    or shorter; to switch it off with a 0 it needs --topic-may-disable.

    A store on a disk is open in one process at a time: stop its broker first.
    """
    from ackstate.analysis.admin.app import ServerSettings, serve
    from ackstate.analysis.admin.policy_routes import BrokerPolicies
    from ackstate.pulsar_conf import read_properties

    token = _token(token_file)
    try:
        properties = {} if conf is None else read_properties(conf)
        broker = BrokerPolicies.from_pulsar_conf(properties, topic_may_disable=topic_may_disable)
    except ValueError as error:
        raise AckStateError(f"{conf}: {error}") from error
    serve(ServerSettings(store, port, host, token, broker), announce=console.show)


def _token(path: Path | None) -> bytes | None:
    """Return the token of a file, or else of the environment; None if there is neither."""
    from ackstate.analysis.admin.app import check_token

    if path is not None:
        token = read_token(path).encode()
    elif TOKEN_VARIABLE in os.environ:
        token = os.fsencode(os.environ[TOKEN_VARIABLE]).strip()
    else:
        return None
    try:
        check_token(token)
    except ValueError as error:
        raise AckStateError(f"{path or TOKEN_VARIABLE} holds no token: {error}") from None
    return token
