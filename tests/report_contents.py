"""A report's contents without Spark: small, and of every kind that the page has to show."""

from ackstate.analysis.estimate.current_policy import PULSAR_4_2
from ackstate.analysis.estimate.results import SweepResult
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.report.contents import Contents, CrashTimes, Curve, worst_subscriptions

BEGIN_MS = 1_700_000_000_000
DURATION_MS = 600_000
TOPICS = tuple(f"persistent://public/default/orders-{number}" for number in range(3))
FLUSHES = (60_000, 20_000, 5_000, 1_000)


def row(policy, scope, *, topic="", subscription="", expected=0.0, most=0, scale=1, duration_ms=DURATION_MS):
    """An estimate as Spark returns it."""
    lasting = duration_ms > 0
    young, cut = (expected * 0.25, expected * 0.15) if policy else (0.0, 0.0)
    return {
        "policy": policy, "scope": scope, "namespace": "" if scope == "total" else "public/default", "topic": topic,
        "subscription": subscription, "expected": expected if lasting else None,
        "p50": int(expected) if lasting else None, "p90": int(1.5 * expected) if lasting else None,
        "p99": int(1.9 * expected) if lasting else None, "max": most,
        "max_ts_ms": BEGIN_MS + duration_ms * 2 // 3 if most else None,
        "not_flushed": expected - young - cut if lasting else None, "young": young if lasting else None,
        "cut_by_ranges": cut if lasting else None, "cut_by_bytes": 0.0 if lasting else None,
        "cut_by_route": 0.0 if lasting else None, "write_count": 7 * scale, "bytes_written": 4_321 * scale,
        "bytes_kept": 800 + scale, "bytes_kept_max": 900 + scale, "blocked_ms": 10 * scale, "duration_ms": duration_ms,
        "duplicates_per_day": expected if lasting else None,
    }  # fmt: skip


def sweep_rows(policy, names, *, share, scale, duration_ms=DURATION_MS):
    """The rows of one policy, under which a share of the most comes back, for a price."""
    each = [(topic, name, share * (1000.5 / (number + 1))) for number, (topic, name) in enumerate(names)]
    found = [
        row(policy, "subscription", topic=topic, subscription=name, expected=expected, most=int(2 * expected),
            scale=scale, duration_ms=duration_ms)
        for topic, name, expected in each
    ]  # fmt: skip
    for scope, topics in (("topic", sorted({topic for topic, _ in names})), ("namespace", [""]), ("total", [""])):
        for topic in topics:
            expected = sum(number for of, _, number in each if not topic or of == topic)
            found.append(
                row(policy, scope, topic=topic, expected=expected, most=int(1.8 * expected), scale=scale,
                    duration_ms=duration_ms)
            )  # fmt: skip
    return found


def usual_names(count=5):
    return [(TOPICS[number % len(TOPICS)], f"sub-{number:04}") for number in range(count)]


def sweep_result(names=None, *, flushes=FLUSHES, duration_ms=DURATION_MS, trace="traces/orders"):
    """As recorded, then a policy for each flush interval: the shorter, the less comes back and the more it costs."""
    names = usual_names() if names is None else names
    policies = [None, *(Policy.from_mapping({"flush_interval_ms": each}) for each in flushes)]
    rows = [
        each
        for number in range(len(policies))
        for each in sweep_rows(
            number, names, share=1 if number == 0 else flushes[number - 1] / 60_000, scale=4**number,
            duration_ms=duration_ms,
        )
    ]  # fmt: skip
    return SweepResult.of_rows(trace, policies, rows, crashes_per_day=1.0)


BETTER = {"mark_delete_rate_limit": 5, "range_count_max": 50_000}


def pulsar_result(*, names=None, current=None, better=None):
    """As recorded, the default policy of Pulsar, and a better one."""
    names = usual_names() if names is None else names
    policies = [None, Policy.from_mapping(PULSAR_4_2), Policy.from_mapping(PULSAR_4_2 | (better or {}))]
    shares = (1, current or 1, 0.2)
    rows = [
        each for number, share in enumerate(shares) for each in sweep_rows(number, names, share=share, scale=4**number)
    ]
    return SweepResult.of_rows("t", policies, rows, crashes_per_day=1).compared_with(
        policies[1].label, "read from broker.conf"
    )


def saw(policy, key, most, *, duration_ms=DURATION_MS, points=60, causes=False):
    """A curve that rises and falls; at a third of its time everything is written."""
    times = sorted({BEGIN_MS + duration_ms * step // points for step in range(points + 1)})
    value = [0 if step in {0, len(times) // 3} else 1 + most * (step % 12) // 12 for step in range(len(times))]
    young = [number // 4 if causes else 0 for number in value]
    cut = [number // 7 if causes else 0 for number in value]
    nothing = (0,) * len(value)
    return Curve(policy, *key, tuple(times), tuple(value), (tuple(young), tuple(cut), nothing, nothing))


def contents(result=None, *, crashes=(BEGIN_MS + 250_000, BEGIN_MS + 400_000), duration_ms=DURATION_MS):
    result = sweep_result() if result is None else result
    curves = [
        saw(number, ("", ""), each.total.max, duration_ms=duration_ms, causes=number > 0)
        for number, each in enumerate(result.shown)
    ]
    curves += [
        saw(0, key, 900 // (number + 1), duration_ms=duration_ms)
        for number, key in enumerate(worst_subscriptions(result))
    ]
    provenance = (("SHA-256 of the trace", "5e" * 32), ("command", "ackstate sweep traces/orders"), ("Spark", "4.1"))
    return Contents(
        result, tuple(curves), CrashTimes(tuple(crashes), len(crashes)), provenance
    )  # fmt: skip
