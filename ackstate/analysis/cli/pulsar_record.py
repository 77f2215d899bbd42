"""`ackstate pulsar record` records a running cluster over its admin interface."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import duration_option, path_argument
from ackstate.analysis.cli.pulsar_access import (
    ANSWER_MIB,
    AnswerMibOption,
    NamespaceOption,
    RequestRateOption,
    RequestTimeoutOption,
    TenantOption,
    TokenFileOption,
    TokenHostOption,
    TrustOption,
    admin_server,
    open_admin,
)
from ackstate.analysis.durations import Duration
from ackstate.analysis.stop_signals import until_stopped
from ackstate.analysis.wording import counted
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from ackstate.analysis.pulsar.record.cluster_recorder import Progress
    from ackstate.analysis.pulsar.record.trace_directory import Resumed


def record(
    url: Annotated[str, typer.Argument(metavar="URL", help="A broker, as http://HOST:8080.")],
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", parser=path_argument, help="A new directory, or one that is to be continued."),
    ],
    topics: Annotated[
        str, typer.Option(metavar="GLOB", help="Only matching topics, as 'public/*/orders*'; all partitions.")
    ] = "",
    every: Annotated[
        Duration, duration_option(plain_unit="s", least="1s", most="1h", help="Poll each topic this often.")
    ] = Duration(1_000),
    for_: Annotated[
        Duration | None,
        duration_option("--for", plain_unit="s", least="1s", help="Stop after TIME; else when interrupted."),
    ] = None,
    requests_per_second: RequestRateOption = 100,
    tenant: TenantOption = None,
    namespace: NamespaceOption = None,
    token_file: TokenFileOption = None,
    token_host: TokenHostOption = None,
    tls_trust_cert_path: TrustOption = "",
    request_timeout: RequestTimeoutOption = Duration(10_000),
    answer_mib_max: AnswerMibOption = ANSWER_MIB,
) -> None:
    """Record the acks and persists of a running, unmodified cluster as a trace.

    Polls internalStats, and sometimes stats, of every topic; changes nothing.
    An event between two polls has an interval instead of a time, so
    ackstate redelivery TRACE shows redelivery as LOW to HIGH.

    TRACE gets a file each hour. Ctrl-C, SIGTERM and --for finish the last one.
    After a SIGKILL, start it again with the same TRACE: it continues, and loses
    at most the poll that was being written.

    A topic or broker that does not answer is polled again, at first after 1s,
    later after up to 30s. Its next poll covers the time between. A namespace or
    tenant that cannot be listed is tried again each minute.

    Exit status: 0, 1 if no poll succeeded, or a namespace or tenant could not be
    listed in the end, 2 if the recording could not start or be written.
    """
    server = admin_server(
        url, token_file, timeout=request_timeout, trust_cert_path=tls_trust_cert_path, answer_mib_max=answer_mib_max
    )
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise AckStateError(f"{error.name} is missing: install ackstate[admin,spark]") from error
    from ackstate.analysis.pulsar.snapshot.request_rate import RequestRate

    rate = RequestRate(requests_per_second)
    with open_admin(server, token_host, rate) as admin:
        from ackstate.analysis.pulsar.record.cluster_recorder import ClusterRecorder
        from ackstate.analysis.pulsar.record.trace_directory import TraceDirectory
        from ackstate.analysis.pulsar.snapshot.sources import LiveBroker

        source = LiveBroker(admin, namespaces=namespace or [], tenants=tenant or [])
        with TraceDirectory(trace) as directory, console.progress() as display:
            _print_resumed(trace, directory.resumed)
            recorder = ClusterRecorder(admin, source, directory, every_s=every.seconds, glob=topics)
            task = display.add_task("listing topics", total=None)
            said: set[str] = set()

            def show(state: Progress) -> None:
                for reason in state.unlisted:
                    if reason not in said:
                        console.complain(reason)
                        said.add(reason)
                display.update(task, description=_line(state))

            with until_stopped():
                recorder.run(None if for_ is None else for_.seconds, show)
            found = recorder.progress()
            display.update(task, description="finishing the hour")
            directory.close()
        _print_end(trace, found)
    if found.unlisted or not found.polls:
        raise typer.Exit(1)


def _print_resumed(trace: Path, resumed: Resumed) -> None:
    if resumed.lost_bytes:
        console.complain(
            f"{trace}: the last poll was torn when the process was killed: {resumed.lost_bytes} bytes lost"
        )
    if resumed.recorded:
        count = resumed.recovered_events
        more = f", with {count:,} events of an unfinished hour" if count else ""
        names = sum(subscription != "" for _, subscription in resumed.recorded)
        console.show(f"continuing {trace}: {counted(names, 'subscription')}{more}")


def _print_end(trace: Path, found: Progress) -> None:
    subjects = f"{counted(found.topics, 'topic')}, {counted(found.cursors, 'cursor')}"
    unread = f", {counted(found.unread, 'topic')} not read: {found.last_failure}" if found.unread else ""
    polls = counted(found.polls, "poll")
    console.show(f"{trace}: {found.events:,} events in {polls} of {subjects}{unread}", *found.unlisted)


def _line(state: Progress) -> str:
    unread = f", {state.unread:,} not read" if state.unread else ""
    unread += f", {len(state.unlisted):,} not listed" if state.unlisted else ""
    return (
        f"{counted(state.topics, 'topic')}, {counted(state.cursors, 'cursor')}{unread}, "
        f"{state.polls:,} polls, {state.events:,} events"
    )
