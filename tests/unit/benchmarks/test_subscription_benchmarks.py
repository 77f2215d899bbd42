"""The counts and pictures of the subscription's benchmarks, at a size where they are known beforehand."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from ackstate import Position
from ackstate.limits import GateLimits
from ackstate.limits.rules import Accounting
from benchmarks.bench_overshoot import ALTERNATING, DELAYED, RANGES, Backlog, LimitRun
from benchmarks.bench_subscription import SameMessageLog, above_holes, send, send_and_ack
from benchmarks.overshoot_plot import LimitPanel, UsageCurve, drawn

# Ten messages a second of which five are acked, 2 s later; the limit is 20 ranges.
SMALL = replace(
    RANGES, limit=20, messages_per_s=10, seconds=12, stuck_until_s=10,
    limits=GateLimits(
        max_unpersisted_ack_record_bytes=0, max_unacked_messages=0, max_unacked_messages_per_consumer=0,
        max_unacked_ranges=20,
    ),
)  # fmt: skip


def run(accounting, workload=ALTERNATING):
    return LimitRun(Backlog(delays_even=workload.delays_even), SMALL, workload, interval_s=10).outcome(accounting)


@pytest.mark.slow
def test_the_estimate_passes_the_limit_by_what_is_on_its_way():
    outcome = run(Accounting.ESTIMATE_AT_PERSIST)
    assert (outcome.highest, outcome.curve[6:9]) == (31, [25, 30, 31])
    assert outcome.sent_until_blocked == 62


@pytest.mark.slow
def test_exact_blocks_once_as_much_is_out_as_the_limit_holds():
    outcome = run(Accounting.EXACT)
    # Each of the 20 sent may become a range; only those of odd id do, until the consumer is closed.
    assert (outcome.highest, outcome.sent_until_blocked) == (10, 20)
    assert outcome.blocked_share == 80


@pytest.mark.slow
def test_nothing_is_reserved_for_what_is_delayed():
    exact, estimate = (run(accounting, DELAYED) for accounting in Accounting)
    assert (exact.highest, exact.acked, exact.sent_until_blocked) == (20, 20, 20)
    assert estimate.highest == 41


def test_a_state_with_holes_is_sent_only_what_lies_above_them():
    cursor, subscription = above_holes(3, backlog=2_000)
    assert cursor.deleted.range_count == 3
    assert send(subscription, 100)[:2] == [Position(7, 7), Position(7, 8)]
    cursor, subscription = above_holes(3, backlog=2_000)
    send_and_ack(subscription)
    assert (cursor.deleted.range_count, cursor.backlog, subscription.unacked_messages) == (4, 4, 0)


def test_the_log_of_one_message_deals_out_keys_in_turn():
    log = SameMessageLog(10, keys=(b"a", b"b"))
    assert [message.key for message in log.read([Position(7, 0), Position(7, 3)])] == [b"a", b"b"]


def test_a_curve_is_drawn_to_scale_of_the_highest():
    panel = LimitPanel("<t>", "1 message/s", 10, (UsageCurve("estimate", [0, 20]), UsageCurve("exact", [0, 10])))
    root = ET.fromstring(drawn([panel]))
    svg = "{http://www.w3.org/2000/svg}"
    lines = {line.get("class"): line.get("points") for line in root.iter(f"{svg}polyline")}
    assert lines == {"estimate": "0.0,130.0 290.0,0.0", "exact": "0.0,130.0 290.0,65.0"}
    said = [text.text for text in root.iter(f"{svg}text")]
    assert "<t>" in said
    assert "exact 10, estimate 20; limit 10" in said
    assert "2 s at 1 message/s" in said
