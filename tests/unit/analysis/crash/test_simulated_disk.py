"""The states that a power cut could leave of unsynced data."""

from random import Random

from ackstate.analysis.crash.traced_disk import CallKind, DiskCall, DiskHistory


def drawn(start, *calls):
    """States that a power cut could leave of one file `f`, and the losses of each."""
    history, chance = DiskHistory({"f": start}), Random(1)
    for each in calls:
        history.follow(each if isinstance(each, DiskCall) else DiskCall(each[0], "f", 0, *each[1:]))
    return [history.drawn(chance) for _ in range(400)]


def test_a_cut_that_was_not_synced_may_not_have_happened():
    calls = (CallKind.TRUNCATE, 3), (CallKind.WRITE, 3, b"X")
    assert {state["f"] for state, _ in drawn(b"abcdef", *calls)} == {b"abcdef", b"abc", b"abcX", b"abcXef"}
    assert {state["f"] for state, _ in drawn(b"abcdef", *calls, (CallKind.SYNC,))} == {b"abcX"}


def test_a_file_that_replaces_another_has_some_of_its_names_and_its_last_once_the_directory_was_synced():
    created, renamed = DiskCall(CallKind.CREATE, "g", 1), DiskCall(CallKind.RENAME, "g", 1, new_name="f")
    assert {tuple(sorted(state.items())) for state, _ in drawn(b"x", created, renamed)} == {
        (("f", b"x"),), (("f", b"x"), ("g", b"")), (("f", b""),),
    }  # fmt: skip
    assert drawn(b"x", created, renamed, DiskCall(CallKind.SYNC_DIRECTORY))[0] == ({"f": b""}, [])


def test_a_state_says_what_was_lost():
    cut = " (the file was not synced after that)"
    assert {tuple(losses) for _, losses in drawn(b"", (CallKind.WRITE, 0, b"AB"))} == {
        (), (f"the disk lost: write bytes 0 to 2 of f{cut}",),
        (f"the disk lost: write bytes 0 to 2 of f, but the first 1{cut}",),
    }  # fmt: skip
