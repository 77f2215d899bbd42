"""The pages of the reference: the public names, the help of all commands, Pulsar's keys, and the metrics."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from prometheus_client import CollectorRegistry

from ackstate import MemoryStore
from ackstate.analysis.admin.app import ServerMetrics
from ackstate.analysis.cli.main import app
from ackstate.limits import PolicyStore
from ackstate.metrics import BacklogCollector, CursorCollector, PublishCollector
from ackstate.pulsar_conf import SETTINGS
from ackstate.topic import PublishCounters

if TYPE_CHECKING:
    from collections.abc import Iterator

_WITH_NAMES = ("aio", "cursor", "delay", "dispatch", "limits", "stores", "testing", "topic")
PACKAGES = ("ackstate", *(f"ackstate.{each}" for each in _WITH_NAMES))
"""The packages with public names."""
_NAMES = """# API

The public names of each package, and then what the pages of this site use of its modules.

| package | names |
| --- | --- |
"""
# Each name once: the public ones, and those of their arguments and results. A section has its text, then its names.
_API = {
    "ackstate: positions and ranges": (
        "Pure values and sets. No function here reads a clock, a file or a lock.",
        """
        Position LedgerMap DeletedRanges Run BatchIndexes selection.select selection.Selection selection.Keep
        delivery_ruler.DeliveryRuler AckStateError CorruptStateError UnsupportedVersionError
        InvalidPositionError CursorClosedError CursorFencedError LogFencedError TopicClosedError
        """,
    ),
    "ackstate.cursor": (
        "The ack state of one subscription: acks, persists, recovery.",
        """
        cursor.ManagedCursor cursor.open_cursors cursor.CursorOpening cursor.CursorConfig cursor.Format
        cursor.RangeForm cursor.Repair cursor.persist_all cursor.Receipt cursor.ReceiptStatus
        cursor.PersistResult cursor.PersistTarget cursor.RecoveryReport cursor.RecoverySource cursor.CursorStats
        cursor.CursorListener cursor.Change cursor.UnreadableCursorError
        """,
    ),
    "ackstate.topic, ackstate.dispatch: topics and subscriptions": (
        "The classes that a broker embeds. [Write a broker](../guides/write-a-broker.md) shows them at work.",
        """
        topic.Topics topic.Topic topic.TopicSettings topic.SubscriptionRequest topic.delete_topic dispatch.Start
        dispatch.StartTime dispatch.Subscription dispatch.SubscriptionType dispatch.SubscriptionOptions
        dispatch.Delivery dispatch.DispatchRound dispatch.DeadLetterPolicy dispatch.RetryPolicy
        errors.RescheduleRefusedError dispatch.BlockReason topic.stored_subscriptions topic.StoredSubscription
        cursor.delete_subscription dispatch.DispatchStats dispatch.ConsumerUse dispatch.RuleStats
        dispatch.HoleReport dispatch.AckRefusedError dispatch.ConsumerBusyError dispatch.ConsumerClosedError
        topic.SubscriptionTypeError
        """,
    ),
    "ackstate.topic: messages": (
        "The message log of a topic, publishing under policies, and retention.",
        """
        Message NO_DELAY topic.MessageLog topic.publish_all topic.TopicPublisher topic.PublishCounters
        topic.CounterSample limits.Policies limits.PolicyOwner limits.PolicyStore topic.Retention
        topic.BacklogPolicy topic.trim_log topic.backlog_report topic.BacklogReport
        topic.BacklogQuotaExceededError
        """,
    ),
    "ackstate.aio: asyncio": (
        "Topics and subscriptions with calls to await.",
        "aio.AsyncTopics aio.AsyncTopic aio.AsyncSubscription",
    ),
    "ackstate.stores": (
        "Where cursors and messages are stored. [Choose a store](../guides/choose-a-store.md) compares them.",
        """
        stores.SqliteStore stores.MemoryStore stores.bookkeeper.BookKeeperStore stores.Store stores.LedgerStore
        stores.MetadataStore testing.check_store stores.StoreError stores.StoreFullError stores.StoreLockedError
        stores.LedgerFencedError stores.LedgerNotFoundError stores.PayloadTooLargeError
        stores.VersionMismatchError
        """,
    ),
    "ackstate.limits": (
        "Numbers in, a verdict out: how many messages a dispatcher may send, and which delay a message gets.",
        """
        limits.DispatchGate limits.GateLimits limits.Rule limits.Usage limits.Verdict limits.BrokerLimit
        limits.AckLimiter limits.DelayedDeliveryPolicies limits.BrokerDelayedDelivery
        limits.EffectiveDelayedDelivery limits.effective limits.check_topic_settable
        limits.check_namespace_settable limits.DelayPolicyRefusedError limits.DeliveryDelayExceededError
        """,
    ),
    "ackstate.delay": (
        "Delayed messages: one index for a topic, one view of it for each subscription.",
        """
        delay.DelayedDeliveryTracker delay.TopicDelayIndex delay.SubscriptionDelayView
        delay.InMemoryDelayTracker delay.DelayConfig delay.TrackerKind delay.BucketedDelayIndex
        delay.BucketRecoveryReport delay.BucketRegistry delay.SnapshotStorage
        """,
    ),
    "ackstate.analysis.crash.subject": (
        "A program under test: [crash-test your cursor](../guides/crash-test-your-cursor.md) shows one.",
        """
        analysis.crash.subject.CrashSubject analysis.crash.subject.GaugedSubject
        analysis.crash.subject.Operation analysis.crash.subject.OperationKind analysis.crash.subject.EntryRun
        analysis.crash.subject.Report
        """,
    ),
}
_COMMANDS = """# Commands

The command `ackstate` needs the extra `[cli]`, and some commands another one, which they name when it is missing. Times
are written as `500ms`, `5s`, `1m` or `1h`. This page has the output of `--help` of each command.
"""
_SETTINGS = """# Settings

The fields of [`CursorConfig`](api.md), `GateLimits`, `DelayConfig`, `TopicSettings`, `SubscriptionOptions`,
`DeadLetterPolicy`, `Retention`, `DelayedDeliveryPolicies` and `BrokerDelayedDelivery` are settings. `from_pulsar_conf`
of a class reads these keys from a mapping or from the path of a `broker.conf`; a key that looks like a misspelling is
refused. A class may have another default of its own; a `broker.conf` without the key keeps that.

| key | Pulsar 4.2 | Pulsar 5.0 | setting | remark |
| --- | --- | --- | --- | --- |
"""
_METRICS = """# Metrics

The collectors need the extra `[metrics]`, and those of the admin server the extra `[admin]`. Names that begin with
`pulsar_` mean the same as in Pulsar and have its labels. [Write a broker](../guides/write-a-broker.md#metrics)
shows how to register a collector.
"""
_COLUMNS = 100


class Command(NamedTuple):
    """A command or a group of commands: its words, beginning with `ackstate`, and its help text."""

    words: str
    help_text: str


def commands() -> list[Command]:
    """Return all commands that the help lists, each group before its commands."""
    return list(_below(typer.main.get_command(app), words="ackstate"))


def api_page() -> str:
    """Return the page of the public names, with a directive of mkdocstrings for each."""
    page = _NAMES
    for package in PACKAGES:
        page += f"| `{package}` | {', '.join(f'`{name}`' for name in import_module(package).__all__)} |\n"
    for title, (text, names) in _API.items():
        page += "\n\n".join([f"\n## {title}", text, *(f"::: ackstate.{each}" for each in names.split())]) + "\n"
    return page


def settings_page() -> str:
    """Return the page of Pulsar's keys."""
    rows = []
    for first in (each for each in SETTINGS if each.default):
        fields = [f"`{each.kind}.{each.field}`" for each in SETTINGS if each.key == first.key and each.field]
        default_5 = first.default_5 or first.default
        rows.append(
            f"| `{first.key}` | {first.default} | {default_5} | {', '.join(fields) or 'none'} | {first.remark} |"
        )
    return _SETTINGS + "\n".join(rows) + "\n"


def metrics_page() -> str:
    """Return the page of the metrics of each collector."""
    registry = CollectorRegistry()
    ServerMetrics(registry, PolicyStore(MemoryStore().metadata))
    publishes = PublishCollector(PublishCounters(cluster="here"))
    described: dict[type, list[Any]] = {
        type(each): list(each.describe()) for each in (CursorCollector(), BacklogCollector(), publishes)
    }
    page = _METRICS
    for kind, metrics in {**described, ServerMetrics: list(registry.collect())}.items():
        page += f"\n## {kind.__name__}\n\n`{kind.__module__}`\n\n| metric | type | description |\n| --- | --- | --- |\n"
        for each in metrics:
            name = f"{each.name}_total" if each.type == "counter" else each.name
            text = " ".join(each.documentation.split()).replace("|", "\\|")
            page += f"| `{name}` | {each.type} | {text} |\n"
    return page


def commands_page() -> str:
    """Return the page of commands."""
    sections = [f"## {each.words}\n\n```text\n{each.help_text}\n```\n" for each in commands()]
    return "\n".join([_COMMANDS, *sections])


def _below(command: Any, *, words: str, parent: Any = None) -> Iterator[Command]:
    name = words.rpartition(" ")[2]
    context = typer.Context(command, info_name=name, parent=parent, terminal_width=_COLUMNS, max_content_width=_COLUMNS)
    yield Command(words, "\n".join(line.rstrip() for line in command.get_help(context).splitlines()).strip())
    for name, each in getattr(command, "commands", {}).items():
        yield from _below(each, words=f"{words} {name}", parent=context)
