"""A thread that is interrupted in a call on a file store: its outcome, and that of the calls that share its sync."""

import itertools
import sys
from contextlib import closing

import pytest

from ackstate.cursor import FileStore
from ackstate.cursor.store import ABSENT, StoreError, StoreFullError
from ackstate.stores import file_commit
from ackstate.stores.group_commit import Call
from fake_directory import LOG, FakeDirectory, FakeFile, end_of, full, state_in, state_of

CHANGES = [
    lambda draft: draft.create("late"),
    lambda draft: draft.append_all([(1, b"late"), (2, b"late")]),
    lambda draft: draft.fence(1),
    lambda draft: draft.delete(2),
    lambda draft: draft.put("/a", b"new", expected_version=0),
    lambda draft: draft.put("/b", b"new", expected_version=ABSENT),
    lambda draft: draft.remove("/a", expected_version=1),
]


def made(files):
    """A store with something of everything, whose paths were asked for."""
    store = FileStore.over(FakeDirectory(files))
    store.ledgers.create("billing")
    store.ledgers.create("shipping")
    store.ledgers.append(2, b"kept")
    store.metadata.put("/a", b"old", expected_version=ABSENT)
    store.metadata.children("/")
    return store


def index_of(store):
    with store._log.reading() as index:
        ledgers = {
            ledger_id: (ledger.owner, ledger.fenced, ledger.live_size, *map(list, (ledger.offsets, ledger.sizes)))
            for ledger_id, ledger in index.ledgers.items()
        }
        paths = list(index.paths())
        return ledgers, index.ids_of, dict(index.values), paths, index.live_size, index.next_ledger_id


def interrupted_at(lines, files, call):
    """Run a call that is interrupted at the n-th line of the draft and its index; tell whether it got so far."""
    left = itertools.count(lines, -1)

    def trace(frame, event, _):
        if not frame.f_code.co_filename.endswith(files):
            return trace if "stores" in frame.f_code.co_filename else None
        if event == "line" and next(left) == 0:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def check_interrupts(change):
    """Whichever line of a change is interrupted, all is as it was, and the next call of the group leads it."""
    files = {}
    store = made(files)
    held, index, log = state_of(store), index_of(store), bytes(files[LOG])

    def changes(draft):
        for one in CHANGES[: CHANGES.index(change) + 1]:
            one(draft)

    for line in itertools.count():
        calls = Call(changes), Call(lambda draft: draft.fence(9))
        group = store._log._groups._open_group
        group.calls.extend(calls)

        def lead(group=group):
            with group.lock:
                store._log._lead(group)

        if not interrupted_at(line, ("file_draft.py", "file_records.py"), lead):
            break
        assert not group.is_over
        calls[0].is_withdrawn = True
        lead()
        assert isinstance(calls[1].error, StoreError)
        assert "interrupted" not in str(calls[1].error)
        assert (state_of(store), index_of(store)) == (held, index)
        assert files[LOG] == log
    assert line > 10 * (CHANGES.index(change) + 1)
    assert files[LOG] != log
    after = state_of(store)
    store.close()
    assert state_in(files) == after


@pytest.mark.slow
def test_a_change_interrupted_at_any_line_is_undone_and_the_next_of_the_group_leads():
    check_interrupts(CHANGES[-1])


def test_the_check_catches_a_change_that_is_undone_from_its_end_only(monkeypatch):
    monkeypatch.setattr(file_commit.Draft, "keep", lambda draft, count: None)
    with pytest.raises(AssertionError):
        check_interrupts(CHANGES[0])


def write_one_byte(file, offset, data):
    file.content[offset : offset + 1] = data[:1]
    raise KeyboardInterrupt


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_laid_out", [True, False])
@pytest.mark.parametrize(("method", "interrupted"), [("write", write_one_byte), ("sync", interrupt)])
def test_a_call_interrupted_once_a_byte_of_it_is_written_ends_the_store(monkeypatch, method, interrupted, is_laid_out):
    files = {}
    store = made(files)
    if not is_laid_out:
        del files[LOG][end_of(files[LOG]) :]
    monkeypatch.setattr(FakeFile, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.ledgers.append(1, b"unknown")
    monkeypatch.undo()
    with pytest.raises(StoreError, match="interrupted; close the store and open it again"):
        store.ledgers.append(1, b"refused")


@pytest.mark.parametrize("is_laid_out", [True, False])
def test_a_call_interrupted_before_a_byte_of_it_is_written_is_undone(monkeypatch, is_laid_out):
    files = {}
    store = made(files)
    if not is_laid_out:
        del files[LOG][end_of(files[LOG]) :]
    held = state_of(store)
    monkeypatch.setattr(FakeFile, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.ledgers.append(1, b"undone")
    monkeypatch.undo()
    assert state_of(store) == held
    assert store.ledgers.append(1, b"kept") == 0
    store.close()
    assert state_in(files)[0] == {1: [b"kept"], 2: [b"kept"]}


def test_a_call_interrupted_while_what_was_laid_out_is_cut_for_want_of_room_ends_the_store(monkeypatch):
    """Nothing of it is visible, but it is not known which of the zeros would survive."""
    files = {}
    store = made(files)
    del files[LOG][end_of(files[LOG]) :]

    def fill(file, offset, data):
        raise full() if data.endswith(b"\0") else KeyboardInterrupt

    monkeypatch.setattr(FakeFile, "write", fill)
    with pytest.raises(KeyboardInterrupt):
        store.ledgers.append(1, b"x")
    monkeypatch.undo()
    with pytest.raises(StoreError, match="interrupted"):
        store.ledgers.append(1, b"refused")


def test_a_full_disk_whose_cut_was_interrupted_ends_the_store(monkeypatch):
    store = made({})

    def fill(file, offset, data):
        file.content[offset : offset + 9] = data[:9]
        raise full()

    monkeypatch.setattr(FakeFile, "write", fill)
    monkeypatch.setattr(FakeFile, "sync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.ledgers.append(1, b"x")
    monkeypatch.undo()
    # The log is as long as before, but a power cut could restore the part that was cut off.
    with pytest.raises(StoreError, match="interrupted"):
        store.ledgers.append(1, b"refused")


def test_a_call_that_is_done_by_a_later_leader_is_not_told_what_an_earlier_one_met(monkeypatch):
    """The first leader meets a full disk and is interrupted while it says so; the second one writes."""
    with closing(made({})) as store:
        group, kept = store._log._groups._open_group, file_commit.fail
        calls = [Call(lambda draft, name=name: draft.append_all([(1, name)])) for name in (b"A", b"B")]
        group.calls.extend(calls)

        def fill(file, offset, data):
            raise full()

        def interrupt_when_told(calls, make_error):
            kept(calls, make_error)
            raise KeyboardInterrupt

        monkeypatch.setattr(FakeFile, "write", fill)
        monkeypatch.setattr(file_commit, "fail", interrupt_when_told)
        with pytest.raises(KeyboardInterrupt), group.lock:
            store._log._lead(group)
        assert isinstance(calls[1].error, StoreFullError)
        monkeypatch.undo()
        calls[0].is_withdrawn = True
        with group.lock:
            store._log._lead(group)
        assert (calls[1].result, calls[1].error) == ([0], None)
        assert store.ledgers.read(1, 0, 1) == [b"B"]
