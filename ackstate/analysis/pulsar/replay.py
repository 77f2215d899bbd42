"""Predicts the acked messages that a real Pulsar broker redelivers after its end, from its ACK commands alone.

The prediction is a pure function of one recorded run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from ackstate.analysis.pulsar.ack_commands import (
    AckState,
    CursorMemory,
    from_cursor_ledger,
    from_metadata_store,
    redelivered,
)
from ackstate.analysis.pulsar.policy import BrokerPolicy, PolicyName, broker_policy
from ackstate.analysis.pulsar.recorded_run import AckCommand, End, RecordedRun, Window
from ackstate.analysis.pulsar.writes import (
    LEDGER_CREATION_MS_MAX,
    NO_WRITE,
    WRITE_MS_MAX,
    Clocks,
    LastWrite,
    LimiterCall,
    last_writes,
)
from ackstate.analysis.trace.events import TraceError
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CANDIDATE_COUNT_MAX = 64

# A slow broker is slow at both. This is a rule of thumb, measured on idle, busy and overloaded machines.
_CREATION_PER_HANDLING = 12

LOOK_MS_MAX = 250
"""A recorder on a busy machine looks at cursors at least this often, by its default settings."""

_PROBES = 33
_PROBE_MS = 1e-3
# Multiples of these modulo 1 fill the unit cube evenly (the "R3" sequence: powers of the root of x**4 = x + 1).
_STRIDES = (0.8191725134, 0.6710436067, 0.5497004779)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The possible redelivery of one run.

    Attributes:
        topic: The topic of the run.
        low: The fewest messages that may be redelivered, exact over all courses of events.
        high: The most.
        candidates: Distinct sets that may be redelivered, each in order, the most plausible first; at most
            `CANDIDATE_COUNT_MAX` of them.
        has_ack_types: Whether the run has the type of each ACK command. If it does not, and all of them may be
            cumulative, the prediction covers both readings.
    """

    topic: str
    low: int
    high: int
    candidates: tuple[tuple[int, ...], ...]
    has_ack_types: bool


def predict(
    run: RecordedRun,
    name: PolicyName = PolicyName.PULSAR_4,
    *,
    ledger_creation_ms: float | None = None,
) -> Prediction:
    """Predict the messages that a broker redelivers although the client acknowledged them.

    Raises:
        TraceError: The run's configuration cannot be read.

    Complexity: O(commands) as for `last_writes`, and O(messages) for each set that may be redelivered.
    """
    try:
        policy = broker_policy(run.config, name)
    except ValueError as error:
        raise TraceError(f"config: {error}") from None
    if ledger_creation_ms is None:
        ledger_creation_ms = _learned_creation_ms(run)
    durable: list[AckState] = []
    for commands in filter(None, (run.commands, run.cumulative_commands)):
        if run.end is End.TERM:
            durable += _after_term(run, commands, policy)
        else:
            durable += _after_kill(run, commands, policy, ledger_creation_ms)
    if not run.commands:
        durable.append(CursorMemory(run, batch_index_acks=policy.batch_index_acks).state)
    candidates = tuple(dict.fromkeys(redelivered(run, state) for state in durable))
    sizes = [len(candidate) for candidate in candidates]
    return Prediction(run.topic, min(sizes), max(sizes), candidates[:CANDIDATE_COUNT_MAX], run.has_ack_types)


def _learned_creation_ms(run: RecordedRun) -> float:
    """Return the longest creation of a ledger, proportional to the broker's slowest handling of an ACK command."""
    slowest_ms = max((command.when.end - command.when.first for command in run.commands), default=0.0)
    return max(LEDGER_CREATION_MS_MAX, _CREATION_PER_HANDLING * slowest_ms)


def _after_kill(
    run: RecordedRun, commands: Sequence[AckCommand], policy: BrokerPolicy, ledger_creation_ms: float
) -> Iterator[AckState]:
    """Yield each state that may have been durable, the most plausible first."""
    if run.records:
        order = _seen_writes(run, policy)
    else:
        asked = [asks for asks, _ in _states(run, commands, policy)]
        calls = [LimiterCall(command.when, asks) for command, asks in zip(commands, asked, strict=True)]
        clocks = Clocks(calls, run.cursor_opened, run.broker_up, run.ended_ms, run.cursor_ledger)
        order = [(write, None) for write in _by_plausibility(clocks, policy, ledger_creation_ms)]
    wanted = {number for write, _ in order for number in write}
    nothing = CursorMemory(run, batch_index_acks=policy.batch_index_acks).state
    states = {0: nothing} | {
        number: state.copy() for number, (_, state) in enumerate(_states(run, commands, policy), 1) if number in wanted
    }
    for (position, contents), mark_delete in order:
        written = states[contents]._replace(mark_delete=mark_delete or states[position].mark_delete)
        yield from_cursor_ledger(written, policy) if contents else nothing


_Write = tuple[LastWrite, Position | None]
"""A last write, and its mark-delete position if that was seen."""


def _seen_writes(run: RecordedRun, policy: BrokerPolicy) -> list[_Write]:
    """Return the possible last writes of a run whose records were seen, the most plausible first.

    The last record counts unless it was begun just before the end and not seen to be written: then each of those before
    it may be the last one, too. After the last look, the flush timer may have written once more.
    """
    assert run.records
    found: list[_Write] = []
    for record in reversed(run.records):
        numbers = range(record.commands, record.commands_min - 1, -1)
        found += [(LastWrite(number, number), record.mark_delete) for number in numbers]
        if record.is_written or run.ended_ms - record.begun_ms > WRITE_MS_MAX:
            break
    else:
        found.append((NO_WRITE, None))
    count = len(run.commands)
    if run.records[-1].commands < count and _may_flush(run, policy):
        found.append((LastWrite(count, count), None))
    return found


def _may_flush(run: RecordedRun, policy: BrokerPolicy) -> bool:
    """Return whether the flush timer may have ticked between the last look and the end."""
    up_first, up_end = run.broker_up
    ticks = max(1, ceil((run.ended_ms - up_end) / policy.flush_ms))
    return up_first + ticks * policy.flush_ms <= run.ended_ms + LOOK_MS_MAX


def _after_term(run: RecordedRun, commands: Sequence[AckCommand], policy: BrokerPolicy) -> Iterator[AckState]:
    """Yield each state that may have been durable after a graceful close, the most plausible first.

    A broker that stops its bookie before its cursors cannot write to their ledgers, and falls back to the metadata
    store.
    """
    state = CursorMemory(run, batch_index_acks=policy.batch_index_acks).state
    has_ledger = False
    for asks, reached in _states(run, commands, policy):
        has_ledger, state = has_ledger or asks, reached
    limit = policy.limits.range_count_max
    keeps_ledger = has_ledger and limit != 0 and state.deleted.range_count > policy.metadata_range_count_max
    yield from_metadata_store(state, policy)
    if keeps_ledger:
        yield from_cursor_ledger(state, policy)


def _states(run: RecordedRun, commands: Sequence[AckCommand], policy: BrokerPolicy) -> Iterator[tuple[bool, AckState]]:
    """Yield after each command whether a write was requested, and the state, which the next command changes."""
    memory = CursorMemory(run, batch_index_acks=policy.batch_index_acks)
    for command in commands:
        asks = memory.ack(command)
        yield asks, memory.state


def _by_plausibility(clocks: Clocks, policy: BrokerPolicy, ledger_creation_ms: float) -> list[LastWrite]:
    """Order the possible last writes: clocks in the middle first, then by number of agreeing clocks, then distance."""
    possible = last_writes(clocks, policy, ledger_creation_ms=ledger_creation_ms)
    if len(possible) == 1:
        return list(possible)
    centre, *others = (_probe(clocks, policy, probe) for probe in _probes())
    votes = Counter(write for each in others for write in each)
    middle = min(centre).contents
    return sorted(
        possible,
        key=lambda write: (write not in centre, -votes[write], abs(write.contents - middle), write.position),
    )


def _probes() -> Iterator[tuple[float, float, float]]:
    for number in range(_PROBES):
        first, second, third = ((0.5 + number * stride) % 1 for stride in _STRIDES)
        yield first, second, third


def _probe(clocks: Clocks, policy: BrokerPolicy, at: tuple[float, float, float]) -> set[LastWrite]:
    """Return the possible last writes for fixed clocks."""
    call, opened, up = at
    known = Clocks(
        [LimiterCall(_moment(each.when, call), each.asks) for each in clocks.calls],
        _moment(clocks.cursor_opened, opened),
        _moment(clocks.broker_up, up),
        clocks.ended_ms,
    )
    return last_writes(known, policy, ledger_creation_ms=0)


def _moment(window: Window, share: float) -> Window:
    time = window.first + share * (window.end - window.first - _PROBE_MS)
    return Window(time, time + _PROBE_MS)
