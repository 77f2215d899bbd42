"""`ackstate pulsar export` and `import`: the ack states of Pulsar subscriptions, to a file and back."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ackstate.analysis.admin_client import AdminServer
from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import JsonOption, path_argument
from ackstate.analysis.cli.pulsar import TrustOption
from ackstate.analysis.cli.store import checked_topic, opened_cluster
from ackstate.analysis.cli.tables import new_table
from ackstate.analysis.token_file import read_token
from ackstate.analysis.wording import counted
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ackstate.analysis.pulsar.ack_state_file import ExportedCursor
    from ackstate.analysis.pulsar.import_through_broker import ImportedCursor

_TIMEOUT_S = 60.0


def export(
    url: Annotated[str, typer.Argument(metavar="URL", help="pulsar+zk://HOST:PORT[,HOST:PORT], a live cluster.")],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="persistent://TENANT/NAMESPACE/TOPIC.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", parser=path_argument, help="The file to write.")],
    subscription: Annotated[
        list[str] | None, typer.Option(metavar="S", help="Only this subscription; may be repeated.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write the ack states of a topic's subscriptions to a file. Change nothing in the cluster.

    All partitions of a partitioned topic are exported. Acks that a broker has
    not persisted are not in the file.

    Exit status: 0, 2 if the cluster or a cursor cannot be read.
    """
    from ackstate.analysis.pulsar.ack_state_file import AckStateFile, write_ack_states
    from ackstate.analysis.pulsar.export import exported_cursors

    name = checked_topic(topic)
    with closing(opened_cluster(url)) as cluster:
        cursors = exported_cursors(cluster, name, subscriptions=subscription or [])
    size_bytes = write_ack_states(file, AckStateFile(url, time.time_ns() // 1_000_000, tuple(cursors)))
    if json:
        console.write_json(
            {"file": str(file), "bytes": size_bytes, "cursors": [_exported_json(each) for each in cursors]}
        )
        return
    console.show(_exported_table(cursors))
    console.show(f"{counted(len(cursors), 'cursor')} in {counted(size_bytes, 'byte')}")


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", parser=path_argument, help="A file of pulsar export.")],
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="pulsar://HOST:PORT or pulsar+ssl://HOST:PORT, a live broker."),
    ],
    topic: Annotated[str | None, typer.Option(metavar="T", help="Only this topic of the file.")] = None,
    subscription: Annotated[
        list[str] | None, typer.Option(metavar="S", help="Only this subscription of the file; may be repeated.")
    ] = None,
    as_subscription: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="Import the one subscription under this name: a clone.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file that holds the broker's token.")
    ] = None,
    check: Annotated[
        str | None, typer.Option(metavar="URL", help="The broker's admin URL, to check its cursors.")
    ] = None,
    tls_trust_cert_path: TrustOption = "",
    json: JsonOption = False,
) -> None:
    """Apply the acks of a file of pulsar export. Acks that a subscription already has are kept.

    The acks are sent by an ordinary client. The subscription must have no
    consumers meanwhile, and properties are not imported.

    A topic that is not the exported one is refused, by its messages. A missing
    subscription is created. An interrupted import may be repeated.

    Exit status: 0, 1 if --check finds that acks did not reach the broker, 2 if
    something was refused; then the earlier cursors of the file have been
    imported.
    """
    from ackstate.analysis.pulsar.ack_state_file import read_ack_states

    chosen = _chosen(
        read_ack_states(file).cursors,
        file=file,
        topic=None if topic is None else checked_topic(topic),
        names=subscription or [],
    )
    if as_subscription == "":
        raise typer.BadParameter("--as must not be empty")
    if as_subscription is not None and len({each.subscription for each in chosen}) > 1:
        raise typer.BadParameter("--as needs one subscription: choose it with --subscription")
    token = read_token(token_file) if token_file else ""
    imported = _through_broker(
        url, chosen, as_subscription, token=token, trust_cert_path=tls_trust_cert_path, check=check
    )
    if json:
        console.write_json({"cursors": [_imported_json(each) for each in imported]})
    else:
        console.show(_imported_table(imported))
        remarks = [f"{each.topic}, {each.subscription}: {text}" for each in imported for text in each.remarks]
        console.show(*remarks, counted(len(imported), "cursor"))
    if any(each.missing_acks for each in imported):
        raise typer.Exit(1)


def _through_broker(
    url: str,
    cursors: Sequence[ExportedCursor],
    name: str | None,
    *,
    token: str,
    trust_cert_path: str,
    check: str | None,
) -> list[ImportedCursor]:
    from ackstate.analysis.pulsar.import_through_broker import connected, import_through_broker

    admin = None if check is None else AdminServer(check, token, _TIMEOUT_S, trust_cert_path)
    with connected(url, token=token, trust_cert_path=trust_cert_path) as client:
        imported = [
            import_through_broker(client, each, topic=each.topic, subscription=name or each.subscription)
            for each in cursors
        ]
    return imported if admin is None else _checked(admin, cursors, imported)


def _checked(
    server: AdminServer, cursors: Sequence[ExportedCursor], imported: Sequence[ImportedCursor]
) -> list[ImportedCursor]:
    from ackstate.analysis.admin_client import PulsarAdmin
    from ackstate.analysis.pulsar.import_through_broker import checked

    with PulsarAdmin(server) as admin:
        return [checked(admin, cursor, outcome) for cursor, outcome in zip(cursors, imported, strict=True)]


def _chosen(
    cursors: Sequence[ExportedCursor], *, file: Path, topic: str | None, names: Sequence[str]
) -> list[ExportedCursor]:
    prefix = f"{topic}-partition-"
    chosen = [
        each
        for each in cursors
        if (topic is None or each.topic == topic or each.topic.startswith(prefix))
        and (not names or each.subscription in names)
    ]
    if not chosen:
        there = ", ".join(f"{each.subscription!r} of {each.topic!r}" for each in cursors) or "none"
        raise AckStateError(f"{file} has no such cursor; its cursors are: {there}")
    return chosen


def _exported_json(cursor: ExportedCursor) -> dict[str, Any]:
    return {
        "topic": cursor.topic,
        "subscription": cursor.subscription,
        "mark_delete": str(cursor.content.mark_delete),
        "range_count": cursor.content.deleted.range_count,
        "acked_above": cursor.acked_above,
        "batch_count": len(cursor.content.batch),
    }


def _exported_table(cursors: Sequence[ExportedCursor]) -> Table:
    table = new_table("topic", "subscription", "mark-delete", "ranges", "acked above", "batches")
    for each in cursors:
        found = _exported_json(each)
        numbers = (f"{found[name]:,}" for name in ("range_count", "acked_above", "batch_count"))
        table.add_row(each.topic, each.subscription, found["mark_delete"], *numbers)
    return table


def _imported_json(cursor: ImportedCursor) -> dict[str, Any]:
    mark_delete = None if cursor.mark_delete is None else str(cursor.mark_delete)
    return asdict(cursor) | {"mark_delete": mark_delete, "remarks": list(cursor.remarks)}


def _imported_table(cursors: Sequence[ImportedCursor]) -> Table:
    table = new_table("topic", "subscription", "mark-delete", "ranges", "batches")
    for each in cursors:
        found = _imported_json(each)
        table.add_row(
            each.topic,
            each.subscription,
            found["mark_delete"] or "-",
            *("-" if found[name] is None else f"{found[name]:,}" for name in ("range_count", "batch_count")),
        )
    return table
