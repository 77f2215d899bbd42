"""The engine of `ackstate sweep`, under each broker's own configuration, against forty brokers that were ended.

A recording leaves some things open, and nothing else varies here:

=======  ===============================================================================================================
clock    the broker read its clock for a command between its receipt and the end of its handling
opened   the cursor, and so its limiter, was made within a window of some ms
timer    the timer of all flushes was started within a window of some seconds
ledger   the first write waited up to 400 ms for its ledger; where the broker logged when that was ready, exactly so
second   the broker logged that the cursor began a second ledger at once, which has the position of that moment
type     the recording has no types of acks, and all of them may be cumulative
close    SIGTERM: the broker wrote its cursors, but for parts of batches, or was too late for that
=======  ===============================================================================================================
"""

import gzip
import json
import logging
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from pyroaring import BitMap

from ack_commands import acks_of, messages_of
from ackstate.analysis.estimate.current_policy import read_broker_policy
from ackstate.analysis.replay.acked import EventChunk
from ackstate.analysis.replay.curves import PolicyCurve
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.subscription_replay import opened
from ackstate.analysis.trace.events import EventKind

VECTORS = Path(__file__).parents[3] / "vectors"
FILES = [VECTORS / f"broker-redelivery{name}.jsonl.gz" for name in ("", "-missed", "-typed")]
LEDGER_MS_MAX = 400
SHARES = {"clock": (0, 1), "opened": (0, 1), "timer": (0, 0.5, 1)}  # of each window
# The run, the redelivered messages as measured, the least and the most that the engine gives, the number of sets that
# it gives, and what was uncertain in that recording. The measured set is always among them.
RUNS = """
burst-alternate               750     0   750 2 ledger
burst-random50                  0     0     0 1
default-random95-b10          750   750  1870 5 clock ledger
default-random99              634   634   733 2 opened
flush60-random50-b10-ix         0     0     0 1
flush60-random99                0     0     0 1
graceful-random50-b10-ix     1000  1000  1000 1
graceful-random50-many          0     0   860 2 close
max100-window                   0     0     0 1
max1000-random50             2024  2024  2024 1
max100multi-random99         3461  3461  3461 1
max100multi-window           3711  3711  3711 1
noindex-random95-b10          710   710   710 1
noindex-random95-b10-ix       730   730   730 1
rate0-window                    0     0     0 1
rate1-alternate                14    14    27 2 clock
rate10-alternate               30    10    30 2 clock
rate10-random50                40    20    40 2 clock
wait2-random50                370     0   370 2 opened
wait2-window                  179   179   278 2 opened
rate01-11-0:batched0/cum      333   323   336 7 ledger type
rate01-11-1:three1/a          404   370   416 5 ledger
rate01-11-1:three1/b          472   445   485 5 ledger
rate01-11-1:batched1/cum      503   498   512 5 ledger type
rate01-71-0:three0/b          457   457   457 1
rate01-71-0:three0/c          269   269   269 1
rate01-71-0:batched0/cum      469   469   469 1
rate01-71-1:three1/b          466   466   468 2 second
rate01-71-1:batched1/cum      311   311   311 1
rate01-71-2:three2/a          238   238   238 1
rate01-71-2:three2/b          455   455   455 1
rate01-71-2:batched2/cum      434   434   434 1
rate01-71-2:delayed2/s         99    99    99 1
rate01-71-3:batched3/cum      511   511   511 1
lz4-71-0:batched0/ix          304   301   304 2 timer
lz4-71-0:batched0/cum           0     0     0 1
lz4-71-1:batched1/cum          48     0    48 2 timer
default-71-0:batched0/cum       0     0     0 1
default-71-1:three1/c           0     0     0 1
default-71-1:batched1/plain   466   466   466 1
"""


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR)


class RecordedBroker:
    """One recorded run as a trace, whose times are open."""

    def __init__(self, run, directory):
        self.run, self.commands = run, run["broker_acks_ms"]
        conf = directory / "broker.conf"
        conf.write_text("".join(f"{key}={value}\n" for key, value in run["config"].items()))
        self.settings = read_broker_policy(conf).texts
        self.acked = frozenset(run["client_ack_order"])
        self.measured = frozenset(run["redelivered_acked"])

    def events(self, *, is_cumulative):
        """Return the trace's chunk, with the number of its command as the time of each event, and the log."""
        commands = [[0, 0, acked, "Cumulative" if is_cumulative else (*kind, "Individual")[0]]
                    for _, _, acked, *kind in self.commands]  # fmt: skip
        messages = messages_of(self.run)
        log = {ledger_id: end for ledger_id, _, end in messages}
        columns = np.array(acks_of(self.run | {"broker_acks_ms": commands}), np.int64).reshape(-1, 6).T
        chunk = EventChunk(*columns[:5])
        every = [(ledger_id, message) for ledger_id, first, end in messages for message in range(first, end)]
        return chunk._replace(ts_ms=np.cumsum(chunk.kind == EventKind.COMMAND)), log, every

    @property
    def open_causes(self):
        """What the recording leaves open."""
        run = self.run
        if run["end"] == "term":
            return ["close"]
        found = ["clock", "opened"]
        if run["t_end_ms"] - run["broker_up_ms"][0] >= int(self.settings["flush_interval_ms"]):
            found.append("timer")
        known = run.get("cursor_ledger_ms") or [0, 0]
        if not run.get("cursor_ledger_ms"):
            found.append("ledger")
        if known[0] != known[1]:
            found.append("second")
        if self._may_be_cumulative():
            found.append("type")
        return found

    def _may_be_cumulative(self):
        """Return whether the commands have no types, and each acks all before it and the begin of its last batch."""
        sizes, end = self.run.get("batch_sizes") or [], 0
        if not self.commands or any(len(command) > 3 for command in self.commands):
            return False
        for _, _, acked in self.commands:
            *before, last = acked
            index, words = (last, []) if isinstance(last, int) else last
            mask = sum((word % 2**64) << (64 * at) for at, word in enumerate(words))
            if before != list(range(end, index)) or (mask and mask != (1 << sizes[index]) - (mask & -mask)):
                return False
            end = max(end, index + (not mask))
        return True

    def outcomes(self, causes):
        """Return the sets of acked messages that the engine says are redelivered, one for each course of events."""
        found = set()
        for is_cumulative in (False, True)[: 1 + ("type" in causes)]:
            trace = self.events(is_cumulative=is_cumulative)
            found |= {self._outcome(trace, course) for course in self._courses(causes)}
        if "close" in causes:
            found |= {self._outcome(trace, course, mark_delete_rate_limit=0) for course in self._courses("")}
        return found

    def _courses(self, causes):
        """Yield the times of commands, opening and timer, how long the ledger took, and whether it is one of two."""
        run = self.run
        shares = [moments if cause in causes else (1,) for cause, moments in SHARES.items()]
        for clock, cursor, timer in product(*shares):
            times = [_within(command[:2], clock) for command in self.commands]
            times = np.maximum.accumulate(np.array(times, np.int64))
            instants = times, _within(run["cursor_opened_ms"], cursor), _within(run["broker_up_ms"], timer)
            for creation_ms in self._creations(times, causes):
                yield *instants, creation_ms, False
                if "second" in causes:
                    yield *instants, creation_ms, True

    def _creations(self, times, causes):
        known = self.run.get("cursor_ledger_ms")
        if known is not None:
            first_ms = int(times[self._first_asking()])
            return [max(0, at_ms - first_ms) for at_ms in known[: 1 + ("second" in causes)]]
        later = (int(at_ms - times[0]) for at_ms in times)
        return [0, *sorted({wait_ms for wait_ms in later if 0 < wait_ms < LEDGER_MS_MAX and "ledger" in causes})]

    def _first_asking(self):
        """Return the first command that asks for a write: a cumulative one, or one with the last ack of an entry."""
        left = {}
        for number, (_, _, acked, kind) in enumerate(self.commands):
            for entry in acked:
                index, words = (entry, []) if isinstance(entry, int) else entry
                mask = sum((word % 2**64) << (64 * at) for at, word in enumerate(words))
                left[index] = left.get(index, -1) & mask
                if kind == "Cumulative" or not left[index]:
                    return number
        return 0

    def _outcome(self, trace, course, **changed):
        chunk, log, messages = trace
        times, opened_ms, up_ms, creation_ms, is_second = course
        begin_ms = min([opened_ms, self.run["t_end_ms"], *times[:1]])
        end_ms = self.run["t_end_ms"] - begin_ms
        timing = {"flush_phase_ms": (up_ms - begin_ms) % max(int(self.settings["flush_interval_ms"]), 1),
                  "ledger_creation_ms": creation_ms}  # fmt: skip
        if is_second:
            # All commands until then are as one, which begins both.
            times = np.where(times <= times[0] + creation_ms, times[0], times)
            chunk = EventChunk(
                *(column[(chunk.kind != EventKind.COMMAND) | (times[chunk.ts_ms] > times[0])] for column in chunk)
            )
            timing["ledger_creation_ms"] = 0
        settings = self.settings | timing | changed
        if settings.get("timing") != "PULSAR":
            settings = {key: value for key, value in settings.items() if key not in timing}
        (group,) = opened([Policy.from_mapping(settings)], log, opened_ms - begin_ms)
        points = []
        if len(chunk.kind):
            ts_ms = times[chunk.ts_ms] - begin_ms
            group.replay(chunk._replace(ts_ms=ts_ms), max(end_ms, int(ts_ms[-1]) + 1), [PolicyCurve()], [points])
        acked = group.acked_fold.acked
        (recovered,) = group.recovered(now_ms=end_ms + 1)
        durable = recovered.acked_fold.acked
        # The curve has the number of the messages that a crash loses.
        lost_count = sum(len(entries - durable.get(ledger_id, BitMap())) for ledger_id, entries in acked.items())
        assert lost_count == (points[-1].value[-1] if points else 0)
        lost = [
            number for number, (ledger_id, message) in enumerate(messages) if message not in durable.get(ledger_id, ())
        ]
        return self.acked.intersection(lost)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("conf")
    runs = [json.loads(line) for file in FILES for line in gzip.decompress(file.read_bytes()).splitlines()]
    return {run["topic"].rpartition("default/")[2]: RecordedBroker(run, directory) for run in runs}


ROWS = [(words[0], [int(word) for word in words[1:5]], words[5:]) for words in map(str.split, RUNS.split("\n")[1:-1])]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "numbers", "causes"), ROWS, ids=[row[0] for row in ROWS])
def test_the_engine_gives_what_a_real_broker_redelivered(name, numbers, causes, brokers):
    broker = brokers[name]
    assert not set(causes) - set(broker.open_causes)
    found = broker.outcomes(broker.open_causes)
    assert broker.measured in found
    counts = [len(each) for each in found]
    assert [len(broker.measured), min(counts), max(counts), len(found)] == numbers
    # The causes that are not named change nothing.
    assert broker.outcomes(causes) == found


@pytest.mark.slow
def test_every_recorded_run_is_here(brokers):
    assert list(brokers) == [name for name, *_ in ROWS]
    assert len(ROWS) == 40
    assert sum(not causes for *_, causes in ROWS) == 24


def _within(window, share):
    first, last = window
    return round(first + share * (last - first))
