"""The broker stepped on a clock of numbers: its store equals its trace, wherever it stops.

And the judge is judged: a store that forgets, and a trace that misses acks, are reported.
"""

import pytest

from ackstate import CursorFencedError, ManagedCursor, MemoryStore
from ackstate.analysis.demo.broker import SUBSCRIPTIONS, TOPIC, DemoBroker, DemoSettings, recover
from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.recording import Recording, read_recording
from ackstate.stores.memory import Fault, FaultKind, PowerCutError
from traces import last_state

pytestmark = pytest.mark.slow

SETTINGS = DemoSettings(seed=3, entries_per_ledger_max=300, flush_interval_ms=60, delay_ms_max=100)


def run(store, directory, *, steps, settings=SETTINGS):
    with Recording(directory) as recording:
        broker = DemoBroker(store, recording, settings, now_ms=0)
        for now_ms in range(0, steps * 2, 2):
            broker.step(now_ms=now_ms)
    return broker


def events_of(directory, subscription):
    return [
        event for frame in read_recording(directory) if frame.subscription == subscription for event in frame.events
    ]


def assert_predicted(results, directory):
    assert {result.subscription for result in results} == set(SUBSCRIPTIONS)
    for result in results:
        last = last_state(events_of(directory, result.subscription))
        assert result.observed in (last.redelivery, last.if_written)
        assert last.persisting or result.observed == last.redelivery
        assert result.lost == result.invented == 0
        assert result.acked == result.durable + result.observed


def test_the_workload_has_what_it_promises(tmp_path):
    store = MemoryStore()
    broker = run(store, tmp_path, steps=1_000)
    assert len(broker.ledgers.counts()) > 5
    published = [e for e in events_of(tmp_path, "") if e.kind is EventKind.PUBLISH]
    assert {e.number > 0 for e in published} == {True, False}
    sent = [e for e in events_of(tmp_path, "eight-consumers") if e.kind is EventKind.DELIVER]
    assert {e.number for e in sent} == set(range(8))
    results = {r.subscription: r for r in recover(MemoryStore(store.disk), read_recording(tmp_path), now_ms=9_000)}
    assert results["in-order"].report.range_count == 0
    assert results["one-percent-stuck"].report.range_count > 10


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_a_crash_at_any_write_leaves_one_of_the_two_right_answers(tmp_path, step):
    settings = DemoSettings(seed=5, messages_per_second=1_000, flush_interval_ms=20, delay_ms_max=20)
    inside = 0
    for mutation in range(12, 90, step):  # before that the log and the cursors are created
        for kind in (FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER):
            directory = tmp_path / f"{mutation}-{kind.name}"
            store = MemoryStore(faults=[Fault(mutation, kind)])
            with pytest.raises(PowerCutError):
                run(store, directory, steps=10_000, settings=settings)
            results = recover(MemoryStore(store.disk), read_recording(directory), now_ms=10_000)
            assert_predicted(results, directory)
            inside += any(last_state(events_of(directory, r.subscription)).persisting for r in results if r.acked)
    assert inside > 20 / step, "no crash fell inside a persist, so half of the test did not happen"


def test_a_fenced_broker_notes_its_failed_persist(tmp_path):
    store = MemoryStore()
    with Recording(tmp_path) as recording:
        broker = DemoBroker(store, recording, SETTINGS, now_ms=0)
        for now_ms in range(0, 100, 2):
            broker.step(now_ms=now_ms)
        for name in SUBSCRIPTIONS:
            ManagedCursor.open(store, topic=TOPIC, subscription=name, ledgers=broker.ledgers, now_ms=100)
        with pytest.raises(CursorFencedError, match="another owner"):
            broker.step(now_ms=400)
    assert EventKind.PERSIST_FAILED in {e.kind for name in SUBSCRIPTIONS for e in events_of(tmp_path, name)}


@pytest.mark.parametrize("judged", ["lost", "invented"])
def test_a_store_that_forgets_and_a_trace_that_misses_acks_are_reported(tmp_path, monkeypatch, judged):
    store = MemoryStore()
    append = store.ledgers.append

    def forget(ledger_id, entries):
        is_delta = store.disk.ledgers[ledger_id].owner.startswith("cursor ") and store.ledgers.last(ledger_id) >= 0
        return store.ledgers.last(ledger_id) + len(entries) if is_delta else append(ledger_id, entries)

    if judged == "lost":
        monkeypatch.setattr(store.ledgers, "append", forget)
    run(store, tmp_path, steps=333)
    missed_ms = 100 if judged == "invented" else -1
    frames = [frame for frame in read_recording(tmp_path) if frame.events[0].ts_ms > missed_ms]
    results = recover(MemoryStore(store.disk), frames, now_ms=1_000)
    assert any(getattr(result, judged) > 0 for result in results)
