"""The slow, obvious answer: the redelivery of a crash after each event, by sets of positions and nothing else."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from hypothesis import strategies as st

from ackstate.analysis.trace.events import Event, EventKind


class StateAfterEvent(NamedTuple):
    """After one event: the redelivery of a crash, the same if a persist under way was written, and the state."""

    redelivery: int
    if_written: int
    persisting: bool
    alive: bool


def replay(events):
    """Replay a trace by sets and return the `State` after each event."""
    acked, durable, begun, alive, states = set(), set(), None, True, []
    for event in events:
        run = {(event.ledger_id, entry) for entry in range(event.first_entry, event.last_entry + 1)}
        match event.kind:
            case EventKind.ACK | EventKind.MARK_DELETE:
                acked |= run
            case EventKind.PERSIST_BEGUN:
                begun = set(acked)
            case EventKind.HELD_BACK | EventKind.CUT_OFF:
                begun -= run
            case EventKind.DISPLACED:
                begun, durable = begun - run, durable - run
            case EventKind.PERSIST_ENDED:
                durable, begun = durable if begun is None else begun, None
            case EventKind.CRASH:
                alive = False
            case EventKind.RECOVER | EventKind.RESET:
                acked |= run if event.first_entry >= 0 else set()
                durable, begun, alive = set(acked), None, True
            case EventKind.REDELIVER:
                acked -= run
                durable -= run
        written = durable if begun is None else begun
        states.append(StateAfterEvent(len(acked - durable), len(acked - written), begun is not None, alive))
    return states


def last_state(events):
    """Return the `State` at the end of a trace, which may be empty."""
    return replay(events)[-1] if events else StateAfterEvent(0, 0, persisting=False, alive=True)


def runs_of(members):
    """Gather (ledger, entry) pairs into (ledger, first, last)."""
    grouped = groupby(enumerate(sorted(members)), key=lambda item: (item[1][0], item[1][1] - item[0]))
    for _, group in grouped:
        pairs = [pair for _, pair in group]
        yield pairs[0][0], pairs[0][1], pairs[-1][1]


@st.composite
def traces(draw):
    """A trace that could have been recorded: persists begin and end, crashes are recovered from."""
    length = draw(st.integers(1, 60))
    chance = draw(st.randoms(use_true_random=False))
    ts_ms, events, persisting, alive = 1_000, [], False, True
    acked, durable, begun = set(), set(), set()
    for _ in range(length):
        ts_ms += chance.choice((0, 0, 0, 1, 2, 7))
        choice = chance.random()
        if not alive:
            events.append(Event(ts_ms, EventKind.RECOVER))
            events += [Event(ts_ms, EventKind.REDELIVER, *run) for run in runs_of(acked - durable)]
            acked, alive, persisting = set(durable), True, False
        elif choice < 0.65:
            ledger, first, count = chance.randrange(3), chance.randrange(200), chance.choice((1, 1, 1, 3, 90))
            kind = chance.choice((EventKind.ACK, EventKind.MARK_DELETE))
            events.append(Event(ts_ms, kind, ledger, first, first + count - 1))
            acked |= {(ledger, entry) for entry in range(first, first + count)}
        elif choice < 0.78 and not persisting:
            events.append(Event(ts_ms, EventKind.PERSIST_BEGUN))
            persisting, begun = True, set(acked)
        elif choice < 0.9 and persisting:
            written = chance.random() < 0.8
            events.append(Event(ts_ms, EventKind.PERSIST_ENDED if written else EventKind.PERSIST_FAILED))
            persisting, durable = False, begun if written else durable
        elif choice < 0.95:
            events.append(Event(ts_ms, EventKind.DELIVER, 0, 1, 1))
        else:
            events.append(Event(ts_ms, EventKind.CRASH))
            alive = False
    return events or [Event(ts_ms, EventKind.CRASH)]
