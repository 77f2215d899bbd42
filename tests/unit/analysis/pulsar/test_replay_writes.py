"""Which writes a broker may have made: stories by the clock, and brokers that are simulated do nothing else."""

from __future__ import annotations

import random

import pytest

from ackstate.analysis.pulsar.policy import BrokerPolicy
from ackstate.analysis.pulsar.recorded_run import Window
from ackstate.analysis.pulsar.writes import NO_WRITE, Clocks, LastWrite, LimiterCall, last_writes
from ackstate.cursor.pace import MarkDeleteRateLimiter

EXACT = 1e-3
LATE_MS = 100_000
NO_FLUSH = BrokerPolicy(flush_ms=10 * LATE_MS)


def at(time, until=None):
    return Window(time, time + EXACT if until is None else until)


def clocks(*calls, opened=-5_000, up=-6_000, end=LATE_MS, asks=True, ledger=None):
    """A run whose commands come at times, or in windows given as pairs."""
    windows = [at(*call) if isinstance(call, tuple) else at(call) for call in calls]
    spans = (at(*time) if isinstance(time, tuple) else at(time) for time in (opened, up))
    return Clocks([LimiterCall(window, asks) for window in windows], *spans, end, ledger and at(*ledger))


def written(*calls, policy=NO_FLUSH, creation_ms=0, **more):
    return last_writes(clocks(*calls, **more), policy, ledger_creation_ms=creation_ms)


def covered(*calls, **more):
    """Return how many commands the last write may hold, of a cursor whose ledger is made at once."""
    found = written(*calls, **more)
    assert all(position == contents for position, contents in found)
    return {write.contents for write in found}


def test_an_idle_limiter_grants_two_at_once_and_then_one_a_second():
    assert covered(0, 1, 2, 998, 999) == {2}
    assert covered(0, 1, 2, 999, 1_001, 1_002) == {5}


def test_a_young_limiter_has_saved_as_long_as_it_lives():
    """It opened 300 ms before the first command, so that the next permit is paid for 1,000 ms after that opening."""
    assert covered(0, 100, 699, opened=-300) == {1}
    assert covered(0, 100, 701, opened=-300) == {3}
    assert covered(0, 100, 650, opened=(-400, -300)) == {1, 3}


def test_a_permit_that_falls_into_the_handling_of_a_command_leaves_both_open():
    assert covered(0, 1, (995, 1_005)) == {2, 3}
    # Of many commands at that boundary any may be the one that is written, and none after it for a second.
    assert covered(0, 100, 510, 530, 550, 570, 590, 610, opened=(-500, -400)) == {3, 4, 5, 6, 7, 8}


def test_the_flush_writes_what_was_refused():
    policy = BrokerPolicy(flush_ms=5_000)
    assert covered(0, 1, 2, policy=policy, up=-3_000, end=1_900) == {2}
    assert covered(0, 1, 2, policy=policy, up=-3_000, end=2_100) == {3}
    # The tick came between the second and the third command: nothing was dirty, and the next one is too late.
    assert covered(0, 1, 3, policy=policy, up=-4_998, end=4_000) == {2}
    assert covered(0, 1, 2, policy=policy, up=(-4_000, 0), end=3_000) == {2, 3}


def test_a_flush_asks_the_limiter_and_takes_its_permit():
    policy = BrokerPolicy(flush_ms=1_000)
    # Refused at 500, tried again at 1,500: granted, and the command at 2,000 finds the limiter shut for it.
    assert covered(0, 1, 2, 1_990, policy=policy, up=-500, end=2_100) == {3}
    assert covered(0, 1, 2, 1_990, policy=BrokerPolicy(flush_ms=LATE_MS), up=-500, end=2_100) == {4}


def test_every_phase_of_a_timer_that_is_long_up_is_tried():
    policy = BrokerPolicy(flush_ms=1_000)
    assert covered(0, 1, 2, policy=policy, up=(-90_000, -6_000), end=900) == {2}
    assert covered(0, 1, 2, policy=policy, up=(-90_000, -6_000), end=1_500) == {2, 3}
    assert covered(0, 1, 2, policy=policy, up=(-90_000, -6_000), end=2_500) == {3}


def test_without_a_limiter_all_is_written_at_once():
    assert covered(0, 0, 0, policy=BrokerPolicy(writes_per_second=0)) == {3}


def test_a_command_that_does_not_ask_is_not_written():
    assert covered(0, 1, asks=False) == {0}


def test_the_first_write_holds_what_was_acked_while_its_ledger_was_made():
    """The mark-delete position is that of the command that was granted the write, or, if rarely, of the last one."""
    found = written(0, 50, 500, opened=-1, creation_ms=100)
    assert found == {LastWrite(1, 1), LastWrite(1, 2), LastWrite(2, 2)}
    assert written(0, 50, 500, opened=-1, creation_ms=10) == {LastWrite(1, 1)}
    assert written(0, 50, 350, 500, opened=-1) == {LastWrite(1, 1)}


def test_a_command_that_is_granted_a_write_while_the_ledger_is_made_gives_its_position():
    # An idle limiter grants two: the first write is that of the second, whatever waits before it.
    assert written(0, 20, 40, creation_ms=50) >= {LastWrite(2, 2), LastWrite(2, 3)}
    assert LastWrite(1, 3) not in written(0, 20, 40, creation_ms=50)
    assert written(0, 20, 40, creation_ms=10) == {LastWrite(2, 2)}


def test_a_ledger_whose_time_is_known_leaves_no_choice():
    calls = range(0, 1_000, 100)
    assert len(written(*calls, opened=-1, creation_ms=600)) > 10
    known = written(*calls, opened=-1, creation_ms=600, ledger=(450, 460))
    assert known == {LastWrite(1, 5), LastWrite(5, 5)}
    # It counts even if it took longer than is assumed of others.
    assert written(*calls, opened=-1, creation_ms=10, ledger=(450, 460)) == known
    assert written(*calls, opened=-1, ledger=(450, 501)) > known


def test_a_write_at_the_end_may_not_have_been_done():
    assert covered(0, 2_000, 4_000, end=4_010) == {2, 3}
    # A new ledger begins with a record of the position before the first write.
    assert written(0, 10, opened=-1, end=50, creation_ms=100) >= {NO_WRITE, LastWrite(0, 2), LastWrite(1, 2)}
    assert written(0, 10, opened=-1, end=170, creation_ms=100, policy=NO_FLUSH) >= {LastWrite(1, 1)}
    assert NO_WRITE not in written(0, 10, opened=-1, end=170, creation_ms=100)


def moment(window, chance):
    """Some whole ms of a window; its ends come up more often than the rest, because rare cases happen there."""
    first, end = map(int, window)
    return chance.choice([first, end - 1, chance.randrange(first, end)])


def simulate(run, policy, chance, creation_ms=0):
    """One course of events, by a limiter that is not the one under test."""
    moments = [moment(call.when, chance) for call in run.calls]
    limiter = MarkDeleteRateLimiter(policy.writes_per_second, now_ms=moment(run.cursor_opened, chance))
    ticks = range(moment(run.broker_up, chance) + policy.flush_ms, int(run.ended_ms), policy.flush_ms)
    # Which of two that meet in a millisecond comes first is a matter of chance as well.
    events = [(time, chance.random(), number) for number, time in enumerate(moments, 1)]
    events += [(time, chance.random(), None) for time in ticks]
    last, position, ready_ms = NO_WRITE, 0, None
    handled, dirty = 0, False
    for time, _, number in [*sorted(events), (run.ended_ms, 0, None)]:
        if ready_ms is not None and ready_ms < time:
            last, ready_ms, creation_ms = LastWrite(position, handled), None, 0
        if time == run.ended_ms or (number is None and not dirty):
            continue
        handled = number or handled
        if limiter.try_acquire(time):
            # Only a flush forgets that something was refused.
            position, dirty = handled, dirty and number is not None
            if creation_ms and ready_ms is None:
                ready_ms = time + chance.randrange(creation_ms) + 0.5
            elif ready_ms is None:
                last = LastWrite(handled, handled)
        else:
            dirty = True
    return last


def random_run(chance, *, unit_ms=1):
    """Commands whose windows do not overlap, as of one thread; all times are multiples of the unit."""
    calls, time = [], 0
    for _ in range(chance.randrange(1, 12)):
        first = time + chance.randrange(0, 400, unit_ms)
        time = first + chance.randrange(unit_ms, 2 * unit_ms + 40, unit_ms)
        calls.append(LimiterCall(Window(first, time), asks=True))
    opened = chance.randrange(-1_500, 0, unit_ms)
    cursor = Window(opened, chance.randrange(opened + unit_ms, unit_ms, unit_ms))
    broker = Window(-3_000, chance.randrange(-3_000 + unit_ms, opened + 1, unit_ms))
    return Clocks(calls, cursor, broker, time + chance.randrange(100, 1_500, unit_ms))


def check_no_simulation_is_impossible(rounds):
    for seed in range(rounds):
        chance = random.Random(seed)
        run = random_run(chance)
        rate, flush_ms = chance.choice([0.5, 1, 2, 10]), chance.choice([300, 1_000, 2_500, 60_000])
        creation_ms = chance.choice([0, 30, 700])
        policy = BrokerPolicy(writes_per_second=rate, flush_ms=flush_ms)
        possible = last_writes(run, policy, ledger_creation_ms=creation_ms)
        simulated = {simulate(run, policy, chance, creation_ms) for _ in range(30)}
        assert simulated <= possible, (seed, simulated - possible)


@pytest.mark.slow
def test_no_simulated_broker_does_what_is_impossible():
    check_no_simulation_is_impossible(rounds=80)


@pytest.mark.slow
def test_what_is_possible_is_seen_when_one_looks_long_enough():
    """Nothing is called possible merely to be safe: some broker really makes it the last write."""
    for seed in range(20):
        chance = random.Random(seed)
        run = random_run(chance, unit_ms=50)
        policy = BrokerPolicy(writes_per_second=chance.choice([1, 2, 5]), flush_ms=chance.choice([730, 60_000]))
        possible = last_writes(run, policy, ledger_creation_ms=0)
        assert {simulate(run, policy, chance) for _ in range(500)} == possible, seed
