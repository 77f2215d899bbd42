"""Outcomes of the demo, written down: three subscriptions, whose numbers all differ from each other."""

from dataclasses import replace

from ackstate.analysis.demo.broker import DemoSettings
from ackstate.analysis.demo.run import DemoRun, Kill, SubscriptionOutcome

BEGIN_MS = 1_700_000_000_000
KILL_MS = BEGIN_MS + 4_000
NAMES = ("eight-consumers", "in-order", "one-percent-stuck")


def outcome(name, *, redelivered, expected=345.678):
    return SubscriptionOutcome(
        name=name,
        acked=10_000 + redelivered,
        durable=10_000,
        predicted_at_kill=redelivered,
        observed=redelivered,
        lost=0,
        invented=0,
        expected=expected,
        p50=redelivered + 1_001,
        p99=redelivered + 1_002,
        max=redelivered + 1_003,
        kill_inside_persist=False,
        predicted_if_not_written=redelivered,
        predicted_if_written=redelivered,
    )


def killed_inside_persist(found, *, not_written, written, observed):
    return replace(
        found,
        kill_inside_persist=True,
        predicted_if_not_written=not_written,
        predicted_if_written=written,
        predicted_at_kill=written if observed == written else not_written,
        observed=observed,
    )


def sawtooth(name, *, redelivered):
    """A curve that rises, falls at a persist, is at `redelivered` at the kill, and goes on with the recovery."""
    return [
        (name, BEGIN_MS, 1),
        (name, BEGIN_MS + 1_000, 701),
        (name, BEGIN_MS + 2_000, 2),
        (name, KILL_MS, redelivered),
        (name, KILL_MS + 900, 0),
    ]


def recovery(name, *, range_count=64, bytes_discarded=0, discarded_reason=""):
    return {
        "subscription": name,
        "mark_delete": f"6:{2_000 + range_count}",
        "report": {
            "source": "journal",
            "records_replayed": 12,
            "bytes_discarded": bytes_discarded,
            "discarded_offset": 4_321 if bytes_discarded else -1,
            "discarded_reason": discarded_reason,
            "range_count": range_count,
        },
    }


def demo_run(names=NAMES, *, seed=7):
    redelivered = {name: 100 * seed + 11 * number for number, name in enumerate(names)}
    return DemoRun(
        seed=seed,
        kill=Kill(kill_ts_ms=KILL_MS, lived_ms=3_900 + seed),
        subscriptions=[outcome(name, redelivered=count) for name, count in redelivered.items()],
        recoveries=[recovery(name, range_count=count + 5) for name, count in redelivered.items()],
        curve=[point for name, count in redelivered.items() for point in sawtooth(name, redelivered=count)],
        settings=DemoSettings(seed=seed),
    )
