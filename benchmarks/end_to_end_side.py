"""One side of `benchmarks.end_to_end`: a program that runs a topic, for this release and for earlier ones.

It is run as a file, with the code to be measured on the path. For each line of its input it runs the workload once and
prints the CPU seconds of its parts as a line of JSON.

Arguments: the prefix of the names of packages (earlier releases had them at the top level), the type of the
subscription, `one by one` or `list`, and the number of messages.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

CONSUMERS = tuple("abcd")
BATCH = 100
OUTSTANDING_OF_EACH = 1_000
KEYS = 1_000


def run(root, subscription_type, ack_by, total):
    def of(name):
        """Return a class from the module that has it in this release or an earlier one."""
        for module in ("message", "stores", "limits", "dispatch", "topic.log", "cursor.subscription", "cursor"):
            with suppress(ImportError, AttributeError):
                return getattr(import_module(f"{root}{module}"), name)
        raise LookupError(name)

    draw = random.Random(1)
    is_keyed = subscription_type == "Key_Shared"
    message = of("Message")
    batches = [
        [
            message(
                payload=bytes(100),
                key=b"k%d" % draw.randrange(KEYS) if is_keyed else None,
                publish_time_ms=1,
                deliver_at_ms=-1,
            )
            for _ in range(BATCH)
        ]
        for _ in range(20)
    ]
    took = dict.fromkeys(("publish", "dispatch", "ack", "persist"), 0.0)
    clock = time.process_time
    with TemporaryDirectory() as directory:
        store = of("SqliteStore")(Path(directory) / "store")
        log = of("MessageLog").open(store, topic="t")
        cursor = of("ManagedCursor").open(store, topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
        subscription = of("Subscription")(
            log, cursor, gate=of("DispatchGate")(of("GateLimits")()),
            kind=of("SubscriptionType")(subscription_type),
        )  # fmt: skip
        held = {consumer: [] for consumer in CONSUMERS}
        for consumer in CONSUMERS:
            add_permits(subscription, consumer, OUTSTANDING_OF_EACH + BATCH)
        published = acked = 0
        begun = time.monotonic()
        while acked < total:
            now_ms = int((time.monotonic() - begun) * 1_000) + 1
            start = clock()
            for _ in CONSUMERS:
                if published < total:
                    log.publish(batches[published // BATCH % len(batches)])
                    published += BATCH
            took["publish"] += clock() - start
            start = clock()
            sent = dispatch_all(subscription, now_ms)
            took["dispatch"] += clock() - start
            for consumer, deliveries in sent:
                held[consumer] += [delivery.position for delivery in deliveries]
            for consumer, mine in held.items():
                chosen = []
                while mine and (len(mine) > OUTSTANDING_OF_EACH or published >= total):
                    at = draw.randrange(len(mine))
                    mine[at], mine[-1] = mine[-1], mine[at]
                    chosen.append(mine.pop())
                start = clock()
                if ack_by == "list":
                    subscription.ack_many(chosen, now_ms=now_ms)
                else:
                    for position in chosen:
                        subscription.ack(position, now_ms=now_ms)
                took["ack"] += clock() - start
                start = clock()
                add_permits(subscription, consumer, len(chosen))
                took["dispatch"] += clock() - start
                acked += len(chosen)
            start = clock()
            cursor.tick(now_ms=now_ms)
            took["persist"] += clock() - start
        assert cursor.mark_delete_position == log.ledgers.last_confirmed
        store.close()
    return took | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024}


def dispatch_all(subscription, now_ms):
    """Send to all consumers, by one call where the release has that; return consumers and deliveries."""
    if hasattr(subscription, "dispatch_all"):
        return subscription.dispatch_all(now_ms=now_ms).deliveries
    return [(consumer, subscription.dispatch(consumer, BATCH, now_ms=now_ms)) for consumer in CONSUMERS]


def add_permits(subscription, consumer, count):
    """Add permits to a consumer, where the release has permits, as clients do for acked messages."""
    if count and hasattr(subscription, "add_permits"):
        subscription.add_permits(consumer, count)


def main():
    *workload, total = sys.argv[1:]
    for _ in sys.stdin:
        print(json.dumps(run(*workload, int(total))), flush=True)


if __name__ == "__main__":
    main()
