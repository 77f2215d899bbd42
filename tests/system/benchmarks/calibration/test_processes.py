"""Killed processes: they are dead then, and their errors are reported."""

from __future__ import annotations

import os
import signal

import pytest

from benchmarks.calibration.processes import WorkerProcess, apart, uninterrupted
from benchmarks.calibration.workload import CalibrationError


def test_a_killed_process_is_gone_and_what_it_said_is_known():
    def work(say):
        say(b"a")
        say(b"b")

    with WorkerProcess(work) as life:
        life.wait_for(b"b")
        assert life.kill() == b"ab"
        with pytest.raises(ChildProcessError):
            os.waitpid(life.pid, 0)
    assert life.kill() == b"ab"


def test_what_is_said_later_is_not_said_yet():
    with WorkerProcess(lambda say: say(b"a")) as life:
        life.wait_for(b"a")
        assert life.said() == b"a"


def test_a_failure_before_its_death_is_told():
    def work(say):
        raise ValueError("planted")

    with WorkerProcess(work) as life, pytest.raises(CalibrationError, match="ValueError: planted"):
        life.wait_for(b"a")


def test_a_process_that_ends_before_its_death_is_told():
    with (
        WorkerProcess(lambda say: os._exit(0)) as life,
        pytest.raises(CalibrationError, match="ended before it was killed"),
    ):
        life.wait_for(b"a")


def test_a_silent_process_is_given_up(monkeypatch):
    monkeypatch.setattr("benchmarks.calibration.processes.PATIENCE_S", 0.01)
    with WorkerProcess(lambda say: None) as life, pytest.raises(CalibrationError, match="said nothing"):
        life.wait_for(b"a")


def test_ctrl_c_is_not_for_it():
    def work(say):
        os.kill(os.getpid(), signal.SIGINT)
        say(b"a")

    with WorkerProcess(work) as life:
        life.wait_for(b"a")


def test_an_answer_comes_from_another_process():
    pid, data = apart(lambda: (os.getpid(), "x" * 1_000_000))
    assert pid != os.getpid()
    assert len(data) == 1_000_000


@pytest.mark.parametrize("find", [lambda: 1 // 0, lambda: os._exit(3)], ids=["raises", "ends"])
def test_a_failed_answer_is_told(find):
    with pytest.raises(CalibrationError, match="was to recover failed"):
        apart(find)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_waits_for_the_end_of_what_may_not_be_interrupted(number):
    done = []

    def block():
        with uninterrupted():
            os.kill(os.getpid(), number)
            done.append(apart(lambda: 1))

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == [1]
    assert signal.getsignal(number) is before


def test_what_fails_is_told_even_if_there_was_a_ctrl_c():
    def block():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            raise CalibrationError("planted")

    with pytest.raises(CalibrationError, match="planted"):
        block()
