"""The pages of the API reference: which page documents which public names."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from website.markdown import table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ApiPage(NamedTuple):
    """One page of the reference.

    Attributes:
        file: Its name, without folder and suffix.
        title: Its heading.
        introduction: One or two sentences below the heading.
        names: The documented objects by section: heading -> full names, in the order of the page.
    """

    file: str
    title: str
    introduction: str
    names: Mapping[str, Sequence[str]]


def _of(module: str, names: str) -> list[str]:
    return [f"{module}.{name}" for name in names.split()]


PAGES = (
    ApiPage(
        "core",
        "ackstate: positions and ranges",
        "Pure values and sets. No function here reads a clock, a file or a lock.",
        {
            "Positions": _of("ackstate", "Position LedgerMap"),
            "Acked entries": _of("ackstate", "DeletedRanges Run BatchIndexes"),
            "Choosing and timing": [
                *_of("ackstate.selection", "select Selection Keep"),
                *_of("ackstate.delivery_ruler", "DeliveryRuler"),
            ],
            "Errors": _of(
                "ackstate",
                "AckStateError CorruptStateError UnsupportedVersionError InvalidPositionError CursorClosedError "
                "CursorFencedError LogFencedError TopicClosedError",
            ),
        },
    ),
    ApiPage(
        "topics",
        "ackstate.topic, ackstate.dispatch: topics and subscriptions",
        "The classes that a broker embeds. [Embedding](../../embedding.md) shows them at work.",
        {
            "Topics": [
                *_of("ackstate.topic", "Topics Topic TopicSettings SubscriptionRequest delete_topic"),
                *_of("ackstate.dispatch", "Start StartTime"),
            ],
            "Subscriptions": [
                *_of(
                    "ackstate.dispatch",
                    "Subscription SubscriptionType SubscriptionOptions Delivery DispatchRound DeadLetterPolicy "
                    "BlockReason",
                ),
                *_of("ackstate.topic", "stored_subscriptions StoredSubscription"),
                *_of("ackstate.cursor", "delete_subscription"),
            ],
            "Statistics": _of("ackstate.dispatch", "DispatchStats ConsumerUse RuleStats HoleReport"),
            "Errors": [
                *_of("ackstate.dispatch", "AckRefusedError ConsumerBusyError ConsumerClosedError"),
                *_of("ackstate.topic", "SubscriptionTypeError"),
            ],
        },
    ),
    ApiPage(
        "asyncio",
        "ackstate.aio: asyncio",
        "Topics and subscriptions with calls to await.",
        {"Classes": _of("ackstate.aio", "AsyncTopics AsyncTopic AsyncSubscription")},
    ),
    ApiPage(
        "messages",
        "ackstate.topic: messages",
        "The message log of a topic, publishing under policies, and retention.",
        {
            "The message log": [*_of("ackstate", "Message NO_DELAY"), *_of("ackstate.topic", "MessageLog publish_all")],
            "Publishing": _of("ackstate.topic", "TopicPublisher PublishCounters CounterSample"),
            "Policies": _of("ackstate.limits", "Policies PolicyOwner PolicyStore"),
            "Retention": _of(
                "ackstate.topic",
                "Retention BacklogPolicy trim_log backlog_report BacklogReport BacklogQuotaExceededError",
            ),
        },
    ),
    ApiPage(
        "cursors",
        "ackstate.cursor",
        "The ack state of one subscription: acks, persists, recovery.",
        {
            "The cursor": _of(
                "ackstate.cursor",
                "ManagedCursor open_cursors CursorOpening CursorConfig Format RangeForm Repair persist_all",
            ),
            "Results": _of(
                "ackstate.cursor",
                "Receipt ReceiptStatus PersistResult PersistTarget RecoveryReport RecoverySource CursorStats",
            ),
            "Listeners": _of("ackstate.cursor", "CursorListener Change"),
            "Errors": _of("ackstate.cursor", "UnreadableCursorError"),
        },
    ),
    ApiPage(
        "stores",
        "ackstate.stores",
        "Where cursors and messages are stored. [Choose a store](../../guides/choose-a-store.md) compares them.",
        {
            "Stores": [
                *_of("ackstate.stores", "SqliteStore MemoryStore"),
                "ackstate.stores.bookkeeper.BookKeeperStore",
            ],
            "The contract of a store": _of("ackstate.stores", "Store LedgerStore MetadataStore"),
            "The conformance suite": _of("ackstate.testing", "check_store"),
            "Errors": _of(
                "ackstate.stores",
                "StoreError StoreFullError StoreLockedError LedgerFencedError LedgerNotFoundError "
                "PayloadTooLargeError VersionMismatchError",
            ),
        },
    ),
    ApiPage(
        "limits",
        "ackstate.limits",
        "Numbers in, a verdict out: how many messages a dispatcher may send, and which delay a message gets.",
        {
            "The dispatch gate": _of("ackstate.limits", "DispatchGate GateLimits Rule Usage Verdict BrokerLimit"),
            "With your own storage": _of("ackstate.limits", "AckLimiter"),
            "Delivery-delay policies": _of(
                "ackstate.limits",
                "DelayedDeliveryPolicies BrokerDelayedDelivery EffectiveDelayedDelivery effective "
                "check_topic_settable check_namespace_settable",
            ),
            "Errors": _of("ackstate.limits", "DelayPolicyRefusedError DeliveryDelayExceededError"),
        },
    ),
    ApiPage(
        "delay",
        "ackstate.delay",
        "Delayed messages: one index for a topic, one view of it for each subscription.",
        {
            "Trackers": _of(
                "ackstate.delay",
                "DelayedDeliveryTracker TopicDelayIndex SubscriptionDelayView InMemoryDelayTracker DelayConfig "
                "TrackerKind",
            ),
            "Buckets": _of(
                "ackstate.delay",
                "BucketedDelayIndex BucketRecoveryReport BucketRegistry SnapshotStorage",
            ),
        },
    ),
    ApiPage(
        "crash-subjects",
        "ackstate.analysis.crash.subject",
        "The interface of a program under test. [Crash testing](../../crash-testing.md) has a complete one.",
        {
            "Subjects": _of("ackstate.analysis.crash.subject", "CrashSubject GaugedSubject"),
            "Values": _of("ackstate.analysis.crash.subject", "Operation OperationKind EntryRun Report"),
        },
    ),
)


PUBLIC = {
    "ackstate": (
        "AckRefusedError AckStateError AsyncTopics BacklogQuotaExceededError BatchIndexes BookKeeperStore BrokerLimit "
        "ConsumerBusyError ConsumerClosedError CorruptStateError CursorClosedError CursorConfig CursorFencedError "
        "DeadLetterPolicy DeletedRanges Delivery DispatchGate Format GateLimits InvalidPositionError LedgerFencedError "
        "LedgerMap LedgerNotFoundError LogFencedError ManagedCursor MemoryStore Message NO_DELAY PayloadTooLargeError "
        "Position Receipt Repair Run SqliteStore Start StartTime StoreError StoreFullError StoreLockedError "
        "Subscription SubscriptionType SubscriptionTypeError Topic TopicClosedError TopicSettings Topics "
        "UnreadableCursorError UnsupportedVersionError VersionMismatchError"
    ),
    "ackstate.aio": "AsyncSubscription AsyncTopic",
    "ackstate.cursor": "CursorListener open_cursors persist_all",
    "ackstate.delay": "BucketedDelayIndex DelayConfig InMemoryDelayTracker TopicDelayIndex TrackerKind",
    "ackstate.dispatch": "SubscriptionOptions",
    "ackstate.limits": "AckLimiter DelayedDeliveryPolicies PolicyStore Rule",
    "ackstate.stores": "LedgerStore MetadataStore Store",
    "ackstate.testing": "check_store",
    "ackstate.topic": "MessageLog Retention",
}
"""The public names by package. The other pages have the values that these give and take, too."""
_NAMES_PAGE = "reference/api/names.md"


def _names_page() -> str:
    """Return the page with one table of all public names, with a link to the page that documents each."""
    pages_of = {full.rpartition(".")[2]: page.file for page in PAGES for names in page.names.values() for full in names}
    rows = [
        (f"[`{name}`]({pages_of[name]}.md)", f"`{module}`")
        for module, names in PUBLIC.items()
        for name in names.split()
    ]
    return "# Public names\n\nEvery name that a program imports.\n\n" + table(("name", "package"), rows)


def navigation() -> list[Mapping[str, str]]:
    """Return the entries of the navigation: title -> page."""
    return [{"Public names": _NAMES_PAGE}, *({each.title: f"reference/api/{each.file}.md"} for each in PAGES)]


def pages() -> dict[str, str]:
    """Return the pages in Markdown: path in the site -> text."""
    return {_NAMES_PAGE: _names_page(), **{f"reference/api/{each.file}.md": _text(each) for each in PAGES}}


def _text(page: ApiPage) -> str:
    lines = [f"# {page.title}", "", page.introduction, ""]
    for heading, names in page.names.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += [f"::: {name}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)
