"""Recordings: frames come back, a cut loses the last one, and damage is found and named."""

import pytest

from ackstate import AckStateError
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recording import Frame, Recorder, read_recording, torn_bytes

ACK = Event(5, EventKind.ACK, 3, 7, 7, 1)
FRAMES = [
    Frame("t", "s", [ACK]),
    Frame("t", "", [Event(6, EventKind.PUBLISH, 2**63 - 1, 0, 2**32 - 1, -1)]),
    Frame("persistent://ü", "a/b", [ACK, Event(-1, EventKind.CRASH)]),
]


def record(directory, frames):
    with Recorder(directory) as recorder:
        for frame in frames:
            recorder.record(*frame)
    return recorder.path


def test_a_frame_is_readable_before_the_recorder_is_closed(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.record(*FRAMES[0])
        assert list(read_recording(tmp_path)) == FRAMES[:1]


def test_a_cut_anywhere_leaves_the_whole_frames_before_it(tmp_path):
    path = record(tmp_path, FRAMES)
    whole = path.read_bytes()
    assert torn_bytes(path) == 0
    seen, ends = [], {}
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        found = list(read_recording(tmp_path))
        assert found == FRAMES[: len(found)]
        seen.append(len(found))
        # Of a header that is cut short nothing is missing.
        begin = ends.setdefault(len(found), max(length, 12))
        assert torn_bytes(path) == max(0, length - begin)
    assert sorted(set(seen)) == list(range(len(FRAMES)))


def test_every_flipped_bit_is_found_and_named(tmp_path):
    path = record(tmp_path, FRAMES)
    whole = path.read_bytes()
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(AckStateError, match=r"000001\.events"):
            list(read_recording(tmp_path))


def test_a_directory_without_a_recording_and_other_kinds_of_events_are_refused(tmp_path):
    with pytest.raises(TraceError, match="no recording here"):
        list(read_recording(tmp_path))
    record(tmp_path, FRAMES)
    record(tmp_path, [Frame("t", "s", [Event(1, 15)])])
    with pytest.raises(TraceError, match=r"000002\.events: the frame at byte 12 is invalid: 15 is not a valid"):
        list(read_recording(tmp_path))
