"""`ackstate pulsar snapshot`, `exporter` and `record` read a live cluster over its admin interface.

`export` and `import` write the ack states of subscriptions to a file and back. `docs/json-output.md` has the JSON.
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict
from enum import Enum
from functools import partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer

from ackstate.analysis.admin_client import AdminServer, read_token
from ackstate.analysis.cli import console
from ackstate.analysis.cli.console import new_table
from ackstate.analysis.cli.options import JsonOption, duration_option, path_argument
from ackstate.analysis.cli.store import checked_topic, opened_cluster
from ackstate.analysis.durations import Duration
from ackstate.analysis.stop_signals import until_stopped
from ackstate.analysis.wording import counted
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.table import Table

    from ackstate.analysis.pulsar.ack_state_file import ExportedCursor
    from ackstate.analysis.pulsar.import_through_broker import ImportedCursor
    from ackstate.analysis.pulsar.judgement import Judgement
    from ackstate.analysis.pulsar.recorder import Progress as Recorded
    from ackstate.analysis.pulsar.sources import LiveBroker, Unread
    from ackstate.analysis.pulsar.trace_directory import Resumed


class _Shipped(Enum):
    """Files for other programs."""

    ALERTS = "alerts"
    DASHBOARD = "dashboard"

    @property
    def file(self) -> str:
        return "alerts.yml" if self is _Shipped.ALERTS else "dashboard.json"


_REASONS_MAX = 20  # subscriptions shown with reasons
_CLOSE_PERCENT = 80

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
MetadataOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Read what is durable here: pulsar+zk://HOST:PORT, or none. By default, where the broker's settings say.",
    ),
]
RequestRateOption: TypeAlias = Annotated[
    float, typer.Option(metavar="N", min=0.1, max=10_000, help="Most requests per second to the cluster.")
]


@contextmanager
def opened_broker(
    url: str,
    token_file: Path | None,
    token_hosts: Sequence[str] | None = None,
    *,
    trust_cert_path: str,
    timeout: Duration = Duration(60_000),
    answer_mib_max: int = ANSWER_MIB,
    requests_per_second: float = 0,
    **chosen: Sequence[str] | None,
) -> Iterator[LiveBroker]:
    """Open connections to the server that the options name, for the `topics`, `namespaces` and `tenants` chosen."""
    token = read_token(token_file) if token_file else ""
    server = AdminServer(url, token, timeout.seconds, trust_cert_path, answer_bytes_max=answer_mib_max * 1024 * 1024)
    from ackstate.analysis.admin_client import PulsarAdmin
    from ackstate.analysis.pulsar.sources import LiveBroker

    with PulsarAdmin(server, token_hosts=token_hosts or [], requests_per_second=requests_per_second) as admin:
        yield LiveBroker(admin, **{name: names or [] for name, names in chosen.items()})


def snapshot(
    url: Annotated[str, typer.Argument(metavar="URL", help="A broker, as http://HOST:8080.")],
    tenant: TenantOption = None,
    namespace: NamespaceOption = None,
    topic: TopicOption = None,
    metadata: MetadataOption = None,
    token_file: TokenFileOption = None,
    token_host: TokenHostOption = None,
    tls_trust_cert_path: TrustOption = "",
    request_timeout: RequestTimeoutOption = Duration(60_000),
    answer_mib_max: AnswerMibOption = ANSWER_MIB,
    top: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Show only the N that redeliver most; totals count all.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what each subscription redelivers if its broker dies now, and how close each limit is.

    Reads the acks in the broker's memory over the admin interface, and between
    two looks at them what is durable: each cursor's record in ZooKeeper and the
    last entry of its ledger. Changes nothing and disturbs no broker. The answer is
    the exact number of acked entries; a range where acks came meanwhile.

    Without access to ZooKeeper and the bookies it is at most a number: every
    acked entry that still exists. A + marks subscriptions whose entries may be
    batches: acked messages of partly acked ones are added.

    Exit status: 0, 1 if a topic, namespace or tenant could not be read, 2 if
    none could.
    """
    with opened_broker(
        url, token_file, token_host, timeout=request_timeout, trust_cert_path=tls_trust_cert_path,
        answer_mib_max=answer_mib_max, topics=topic, namespaces=namespace, tenants=tenant,
    ) as source:  # fmt: skip
        look = _looked(source, metadata)
    if json:
        console.write_json({
            "subscriptions": [each.to_json() for each in look.found[:top]],
            "subscriptions_not_shown": len(look.found[top:]) if top else 0,
            "brokers": look.totals,
            "missing": [each.to_json() for each in look.missing],
            "metadata": look.metadata or None,
            "metadata_unread": look.why_not or None,
        })  # fmt: skip
    else:
        console.show(*_text(look, top=top))
    if look.missing:
        raise typer.Exit(1)


class _Look(NamedTuple):
    found: Sequence[Judgement]
    missing: Sequence[Unread]  # what could not be read
    totals: Sequence[Mapping[str, Any]]  # of each broker
    metadata: str  # the metadata store that was read; empty if none was
    why_not: str  # why none was read; empty if one was


def _looked(source: LiveBroker, metadata: str | None) -> _Look:
    from ackstate.analysis.pulsar.durable import reader_of
    from ackstate.analysis.pulsar.judgement import by_name, judge_topic, most_redelivered_first, totals
    from ackstate.analysis.pulsar.sources import request_all

    topics, unlisted = source.listing()
    reader, why_not = reader_of(metadata, source.settings.metadata_url)
    with console.progress() as progress, reader or nullcontext():
        judged = partial(judge_topic, source=source, reader=reader, unread=why_not)
        shown = partial(progress.advance, progress.add_task("looking at topics", total=len(topics)))
        found, missing = request_all("topic", topics, judged, done=shown)
    if missing and not found:
        raise missing[0].error
    unread = sorted([*unlisted, *missing], key=lambda each: by_name(each.name))
    read = metadata or source.settings.metadata_url if reader else ""
    judgements = most_redelivered_first(chain(*found.values()))
    return _Look(judgements, unread, totals(judgements), read, why_not)


def _text(look: _Look, *, top: int | None) -> Iterator[Table | str]:
    found = look.found
    if not found and not look.missing:
        yield "there are no topics"
        return
    shown = found[:top]
    yield _table(shown, look.missing)
    if len(found) > len(shown):
        yield f"not shown: {counted(len(found) - len(shown), 'cursor')}, none of which redelivers more"
    for number, each in enumerate(shown):
        yield from _reasons(each, is_explained=number < _REASONS_MAX and bool(each.most))
    yield from map(str, look.missing)
    for total in look.totals:
        broker = f"broker {total['owner']}" if total["owner"] else "the broker"
        entries = _number(total["at_least"], total["comes_back"], may_be_more=total["may_have_batches"])
        yield f"if {broker} dies now: {entries} acked entries of {counted(total['subscriptions'], 'subscription')}"
    yield f"durable states: {look.metadata or f'not read: {look.why_not}'}"
    for assumed in sorted({each.assumed for each in found if each.assumed}):
        yield f"settings: {assumed}"


def _table(found: Sequence[Judgement], missing: Sequence[Unread]) -> Table:
    from ackstate.pulsar_conf import METADATA_RANGES

    table = new_table("topic", "subscription", "acked", "ranges", "comes back", "closest limit", "used", "holes left")
    for each in found:
        back = each.comes_back
        entries = _number(back.low, back.high, may_be_more=each.may_have_batches) if back else "-"
        closest = each.limits[0] if each.limits else None
        # More ranges than the metadata store accepts lose nothing: that limit does not bound holes.
        holes = next(
            (
                f"{use.holes_left:,}"
                for use in each.limits
                if use.holes_left is not None and use.setting != METADATA_RANGES
            ),
            "-",
        )
        limit = (closest.setting, f"{closest.percent:.1f} %") if closest else ("-", "-")
        numbers = (f"{len(each.acked.deleted):,}", f"{each.range_count:,}")
        table.add_row(each.topic, each.subscription, *numbers, entries, *limit, holes)
    for unread in missing:
        table.add_row(unread.name, *["-"] * 3, "not read", *["-"] * 3)
    return table


def _reasons(each: Judgement, *, is_explained: bool) -> Iterator[str]:
    """Yield the reason for a number if requested, then the remarks."""
    back, lines = each.comes_back, []
    if is_explained and back is not None:
        lines.append(f"{_number(back.low, back.high)}: {back.why}")
        if each.cut:
            lines.append(f"cut off by the limit if written now: {each.cut:,}")
        lines.append(f"if the topic is unloaded instead: {each.if_unloaded:,}")
        close = (use for use in each.limits if use.percent >= _CLOSE_PERCENT)
        lines += [f"{use.setting}: {use.used:,} of {use.limit:,} {use.unit}: {use.advice}" for use in close]
    lines += each.remarks
    if lines:
        yield f"{each.topic}, {each.subscription}:"
    yield from (f"  {line}" for line in lines)


def _number(low: int, high: int, *, may_be_more: bool = False) -> str:
    """Return a number, range or upper bound as text; with a + if messages of partly acked batches are added."""
    text = f"{high:,}" if low == high else f"{low:,} to {high:,}" if low else f"at most {high:,}"
    return text + "+" * may_be_more


_Regex = Annotated[
    str, typer.Option(metavar="REGEX", help="Only those whose whole names match, as persistent://public/default/o.*")
]


def exporter(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=]URL...", help="A broker of each cluster, as http://HOST:8080."),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65_535, help="The port to listen on; 0 is any free port.")
    ] = 9_478,
    host: Annotated[str, typer.Option(metavar="H", help="Address to listen on, for all clients that reach it.")] = (
        "127.0.0.1"
    ),
    every: Annotated[
        Duration,
        duration_option(plain_unit="s", least="1s", most="1h", help="Look at each cluster this often."),
    ] = Duration(30_000),
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]URL", help="As for snapshot; of one cluster, if it begins with its name."),
    ] = None,
    requests_per_second: RequestRateOption = 50,
    tenant: TenantOption = None,
    namespace: NamespaceOption = None,
    topic: TopicOption = None,
    topic_regex: _Regex = ".*",
    subscription_regex: _Regex = ".*",
    token_file: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]FILE", help="A file with a token, for all clusters or for one."),
    ] = None,
    token_host: TokenHostOption = None,
    tls_trust_cert_path: TrustOption = "",
    request_timeout: RequestTimeoutOption = Duration(60_000),
    answer_mib_max: AnswerMibOption = ANSWER_MIB,
    shown: Annotated[
        _Shipped | None,
        typer.Option("--print", help="Print rules for Prometheus or a dashboard for Grafana."),
    ] = None,
) -> None:
    """Serve to Prometheus how many acked entries of each subscription a crash would redeliver.

    Looks at all topics every 30s in the background, as ackstate pulsar snapshot,
    and a scrape gets the latest result: it costs the cluster nothing, however
    many Prometheus servers there are. Three requests for each topic and look,
    two without metadata; at 50 a second, 500 topics take 30s. A look that takes
    longer than --every is followed by the next at once.

    Each cluster is looked at by itself, and is named in the label cluster; its
    name is the host and port of its URL unless one is given. A broker that does
    not answer is a metric, ackstate_pulsar_topics_unread. /health answers while
    the process runs, /ready once the topics of every cluster were listed.
    Prints one line when it is ready; exits cleanly on SIGTERM and SIGINT.
    """
    if shown is not None:
        console.write(files("ackstate.analysis.pulsar").joinpath(shown.file).read_text("utf-8"))
        return
    clusters = _named_clusters(urls or [])
    tokens, stores = _of_clusters("--token-file", token_file, clusters), _of_clusters("--metadata", metadata, clusters)
    topics = _compiled("--topic-regex", topic_regex)
    subscriptions = _compiled("--subscription-regex", subscription_regex)

    from ackstate.analysis.pulsar.durable import reader_of
    from ackstate.analysis.pulsar.exporter import Collector, run_exporter

    with ExitStack() as held:
        collectors = {}
        for name, url in clusters.items():
            file = tokens.get(name)
            source = held.enter_context(
                opened_broker(
                    url, None if file is None else path_argument(file), token_host, timeout=request_timeout,
                    trust_cert_path=tls_trust_cert_path, answer_mib_max=answer_mib_max,
                    requests_per_second=requests_per_second, topics=topic, namespaces=namespace, tenants=tenant,
                )
            )  # fmt: skip
            collector = Collector(
                source, partial(reader_of, stores.get(name)), topics=topics, subscriptions=subscriptions
            )
            collectors[name] = held.enter_context(closing(collector))
        run_exporter(collectors, (host, port), every_s=every.seconds, announce=console.show, complain=console.complain)


def _named_clusters(urls: Sequence[str]) -> dict[str, str]:
    """Return the URL of each cluster by its name."""
    if not urls:
        raise typer.BadParameter("give the URL of a broker")
    found: dict[str, str] = {}
    for each in urls:
        head, scheme, rest = each.partition("://")
        name, is_named, protocol = head.rpartition("=")
        url = f"{protocol}{scheme}{rest}"
        host, number = AdminServer(url).origin[1:]
        name = name if is_named else f"{host}:{number}"
        if not name or name in found:
            raise typer.BadParameter(f"each cluster must have a name of its own, got {each!r}")
        found[name] = url
    return found


def _of_clusters(option: str, given: Sequence[str] | None, clusters: Mapping[str, str]) -> dict[str, str]:
    """Return the value of an option for each cluster: one that begins with its name, or else one for all."""
    named: dict[str, str] = {}
    for each in given or ():
        name, is_named, value = each.partition("=")
        targets: Iterable[str] = [name]
        if not is_named or name not in clusters:
            targets, value = clusters, each
        for target in targets:
            if named.setdefault(target, value) != value:
                raise typer.BadParameter(f"{option} is given twice for cluster {target}")
    return named


def _compiled(option: str, regex: str) -> re.Pattern[str]:
    try:
        return re.compile(regex, re.DOTALL)  # A name may have more than one line.
    except (re.error, RecursionError, OverflowError) as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def record(
    url: Annotated[str, typer.Argument(metavar="URL", help="A broker, as http://HOST:8080.")],
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", parser=path_argument, help="A new directory, or one that is to be continued."),
    ],
    metadata: MetadataOption = None,
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

    Polls every topic: internalStats for the acks in the broker's memory, then
    the cursors' records and ledgers for what is durable of them. Changes
    nothing, and disturbs no broker. Redelivery is exact at each poll; in between
    it is that of the poll before. Without access to the metadata store, record
    with the broker's interceptor.

    TRACE gets a file each hour. Ctrl-C, SIGTERM and --for finish the last one.
    After a SIGKILL, start it again with the same TRACE: it continues, and loses
    at most the poll that was being written.

    A topic, broker or bookie that does not answer is polled again, at first after 1s,
    later after up to 30s. Its next poll covers the time between. A namespace or
    tenant that cannot be listed is tried again each minute.

    Exit status: 0, 1 if no poll succeeded, or a namespace or tenant could not be
    listed in the end, 2 if the recording could not start or be written.
    """
    from ackstate.analysis.pulsar.trace_directory import TraceDirectory, check_place

    check_place(trace)
    with opened_broker(
        url, token_file, token_host, timeout=request_timeout, trust_cert_path=tls_trust_cert_path,
        answer_mib_max=answer_mib_max, requests_per_second=requests_per_second, namespaces=namespace, tenants=tenant,
    ) as source:  # fmt: skip
        from ackstate.analysis.pulsar.durable import reader_of
        from ackstate.analysis.pulsar.recorder import ClusterRecorder

        source.look_at_broker()
        if source.cursor_properties is None:
            raise AckStateError(
                "the broker embeds ackstate and has no metadata of Pulsar: record its cursors in the broker, with "
                "ackstate.analysis.trace.recording.Recording"
            )
        durable, why_not = reader_of(metadata, source.settings.metadata_url)
        if durable is None:
            raise AckStateError(
                f"what is durable of a cursor is in the cluster's metadata store: {why_not}. Without access to it, "
                "record with the broker's interceptor: see docs/guides/analyse-a-cluster.md"
            )
        with durable, TraceDirectory(trace) as directory, console.progress() as display:
            _print_resumed(trace, directory.resumed)
            recorder = ClusterRecorder(source, durable, directory, every_s=every.seconds, glob=topics)
            task = display.add_task("listing topics", total=None)
            said: set[str] = set()

            def show(state: Recorded) -> None:
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


def _print_end(trace: Path, found: Recorded) -> None:
    subjects = f"{counted(found.topics, 'topic')}, {counted(found.cursors, 'cursor')}"
    unread = f", {counted(found.unread, 'topic')} not read: {found.last_failure}" if found.unread else ""
    polls = counted(found.polls, "poll")
    console.show(f"{trace}: {found.events:,} events in {polls} of {subjects}{unread}", *found.unlisted)


def _line(state: Recorded) -> str:
    unread = f", {state.unread:,} not read" if state.unread else ""
    unread += f", {len(state.unlisted):,} not listed" if state.unlisted else ""
    return (
        f"{counted(state.topics, 'topic')}, {counted(state.cursors, 'cursor')}{unread}, "
        f"{state.polls:,} polls, {state.events:,} events"
    )


_HEADINGS = {"range_count": "ranges", "acked_above": "acked above", "batch_count": "batches"}


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
    from ackstate.analysis.pulsar.ack_state_file import AckStateFile, exported_cursors, write_ack_states

    name = checked_topic(topic)
    with closing(opened_cluster(url)) as cluster:
        cursors = exported_cursors(cluster, name, subscriptions=subscription or [])
    size_bytes = write_ack_states(file, AckStateFile(url, time.time_ns() // 1_000_000, tuple(cursors)))
    exported = [*map(_exported_json, cursors)]
    if json:
        console.write_json({"file": str(file), "bytes": size_bytes, "cursors": exported})
        return
    console.show(_cursors_table(exported, "range_count", "acked_above", "batch_count"))
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
    from ackstate.analysis.admin_client import PulsarAdmin
    from ackstate.analysis.pulsar.import_through_broker import checked, connected, import_through_broker
    from ackstate.analysis.pulsar.sources import LiveBroker

    token = read_token(token_file) if token_file else ""
    server = None if check is None else AdminServer(check, token, trust_cert_path=tls_trust_cert_path)
    with connected(url, token=token, trust_cert_path=tls_trust_cert_path) as client:
        imported = [
            import_through_broker(client, each, topic=each.topic, subscription=as_subscription or each.subscription)
            for each in chosen
        ]
    if server is not None:
        with PulsarAdmin(server) as admin:
            source = LiveBroker(admin)
            imported = [checked(source, cursor, outcome) for cursor, outcome in zip(chosen, imported, strict=True)]
    outcomes = [*map(_imported_json, imported)]
    if json:
        console.write_json({"cursors": outcomes})
    else:
        console.show(_cursors_table(outcomes, "range_count", "batch_count"))
        remarks = [f"{each.topic}, {each.subscription}: {text}" for each in imported for text in each.remarks]
        console.show(*remarks, counted(len(imported), "cursor"))
    if any(each.missing_acks for each in imported):
        raise typer.Exit(1)


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
        "acked_above": len(cursor.content.deleted),
        "batch_count": len(cursor.content.batch),
    }


def _imported_json(cursor: ImportedCursor) -> dict[str, Any]:
    mark_delete = None if cursor.mark_delete is None else str(cursor.mark_delete)
    return asdict(cursor) | {"mark_delete": mark_delete, "remarks": list(cursor.remarks)}


def _cursors_table(cursors: Iterable[Mapping[str, Any]], *numbers: str) -> Table:
    """Return the table of some of the keys in the JSON of cursors."""
    table = new_table("topic", "subscription", "mark-delete", *(_HEADINGS[name] for name in numbers))
    for each in cursors:
        counts = ("-" if each[name] is None else f"{each[name]:,}" for name in numbers)
        table.add_row(each["topic"], each["subscription"], each["mark_delete"] or "-", *counts)
    return table
