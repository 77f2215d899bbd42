"""Which acked messages does a real Pulsar broker deliver again after its end? Predicted from its ACK commands alone.

A pure function of one recorded run; `analysis.pulsar.replay_spark` spreads it over a cluster.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.pulsar.ack_commands import AckState, CursorMemory, from_cursor_ledger, from_metadata_store, redelivered
from analysis.pulsar.policy import BrokerPolicy, PolicyName, broker_policy
from analysis.pulsar.recorded_run import End, RecordedRun, Window
from analysis.pulsar.writes import Clocks, LimiterCall, last_writes
from analysis.trace.events import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

CANDIDATE_COUNT_MAX = 64

_PROBES = 33
_PROBE_MS = 1e-3
# Multiples of these modulo 1 fill the unit cube evenly (the "R3" sequence: powers of the root of x**4 = x + 1).
_STRIDES = (0.8191725134, 0.6710436067, 0.5497004779)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What may come back of one run.

    Attributes:
        topic: Of the run.
        low: The fewest messages that may come back, exact over all courses of events.
        high: The most.
        candidates: Distinct sets that may come back, each in order, the most plausible first; at most
            `CANDIDATE_COUNT_MAX` of them.
    """

    topic: str
    low: int
    high: int
    candidates: tuple[tuple[int, ...], ...]


def predict(run: RecordedRun, name: PolicyName = PolicyName.PULSAR_4) -> Prediction:
    """Predict which messages a broker delivers again although the client acknowledged them.

    Args:
        run: What the broker was given.
        name: The policy to assume; every one but `PULSAR_4` is wrong on purpose.

    Raises:
        TraceError: The run's configuration cannot be read.

    Complexity: O(commands) as `last_writes` says, and O(messages) for each set that may come back.
    """
    try:
        policy = broker_policy(run.config, name)
    except ValueError as error:
        raise TraceError(f"config: {error}") from None
    durable = _after_term(run, policy) if run.end is End.TERM else _after_kill(run, policy)
    candidates = tuple(dict.fromkeys(redelivered(run, state) for state in durable))
    sizes = [len(candidate) for candidate in candidates]
    return Prediction(run.topic, min(sizes), max(sizes), candidates[:CANDIDATE_COUNT_MAX])


def _after_kill(run: RecordedRun, policy: BrokerPolicy) -> Iterator[AckState]:
    """Yield each state that may have been durable, the most plausible first."""
    asks = [asks for asks, _ in _states(run, policy)]
    calls = [LimiterCall(command.when, asks) for command, asks in zip(run.commands, asks, strict=True)]
    order = _by_plausibility(Clocks(calls, run.cursor_opened, run.broker_up, run.ended_ms), policy)
    wanted = set(order)
    states = {number: state.copy() for number, (_, state) in enumerate(_states(run, policy), 1) if number in wanted}
    nothing = CursorMemory(run.positions, batch_index_acks=policy.batch_index_acks).state
    for covered in order:
        yield from_cursor_ledger(states[covered], policy) if covered else nothing


def _after_term(run: RecordedRun, policy: BrokerPolicy) -> Iterator[AckState]:
    """Yield each state that may have been durable after all was closed in order, the most plausible first.

    A broker that stops its bookie before its cursors cannot write to their ledgers, and falls back to the metadata
    store.
    """
    state = CursorMemory(run.positions, batch_index_acks=policy.batch_index_acks).state
    has_ledger = False
    for asks, reached in _states(run, policy):
        has_ledger, state = has_ledger or asks, reached
    limit = policy.limits.range_count_max
    keeps_ledger = has_ledger and limit != 0 and state.deleted.range_count > policy.metadata_range_count_max
    yield from_metadata_store(state, policy)
    if keeps_ledger:
        yield from_cursor_ledger(state, policy)


def _states(run: RecordedRun, policy: BrokerPolicy) -> Iterator[tuple[bool, AckState]]:
    """Yield after each command whether the limiter was asked, and the state, which the next command changes."""
    memory = CursorMemory(run.positions, batch_index_acks=policy.batch_index_acks)
    for command in run.commands:
        asks = memory.ack(command)
        yield asks, memory.state


def _by_plausibility(clocks: Clocks, policy: BrokerPolicy) -> list[int]:
    """Order what the last write may hold: first by clocks in the middle, then by how many clocks agree, then nearby."""
    possible = last_writes(clocks, policy)
    if len(possible) == 1:
        return list(possible)
    centre, *others = (_probe(clocks, policy, probe) for probe in _probes())
    votes = Counter(covered for each in others for covered in each)
    middle = min(centre)
    return sorted(possible, key=lambda covered: (covered not in centre, -votes[covered], abs(covered - middle)))


def _probes() -> Iterator[tuple[float, float, float]]:
    for number in range(_PROBES):
        first, second, third = ((0.5 + number * stride) % 1 for stride in _STRIDES)
        yield first, second, third


def _probe(clocks: Clocks, policy: BrokerPolicy, at: tuple[float, float, float]) -> set[int]:
    """Return what the last write holds if every clock is known."""
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
