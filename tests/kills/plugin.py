"""A pytest plugin that notes the lines that each test executes, or the tests that fail.

`KILLS_LINES=FOLDER` measures the lines of the product's modules; `KILLS_FAILED=FILE` writes the failed tests.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

_LINES, _FAILED = os.environ.get("KILLS_LINES"), os.environ.get("KILLS_FAILED", "")
_failed, _seconds = [], {}

if _LINES:
    import coverage

    ROOT = Path(__file__).resolve().parents[2]
    _coverage = coverage.Coverage(
        data_file=f"{_LINES}/lines.{os.getpid()}", config_file=False, include=[f"{ROOT}/ackstate/*"]
    )

    def pytest_configure(config):
        if hasattr(config, "workerinput"):  # else no test runs here
            _coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item, nextitem):
        if sys.gettrace() is None:  # a test that traces by itself has ended it
            _coverage.stop()
            _coverage.start()
        _coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            _coverage.switch_context("")

    def pytest_unconfigure(config):
        if not hasattr(config, "workerinput"):
            return
        _coverage.stop()
        _coverage.save()
        Path(_LINES, f"seconds.{os.getpid()}.json").write_text(json.dumps(_seconds))

else:

    @pytest.hookimpl(trylast=True)
    def pytest_configure(config):
        """Let a property that fails end there: shrinking its example takes minutes."""
        found = settings.get_profile(os.environ["HYPOTHESIS_PROFILE"])
        settings.register_profile("kills", found, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("kills")


def pytest_runtest_logstart(nodeid):
    if _FAILED:  # if it does not end, it is the one that fails
        Path(_FAILED).write_text(json.dumps([*_failed, nodeid]))


def pytest_runtest_logreport(report):
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0) + report.duration
    if report.failed:
        _failed.append(report.nodeid)


def pytest_collectreport(report):
    if report.failed:
        _failed.append(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    if _FAILED and not hasattr(session.config, "workerinput"):
        Path(_FAILED).write_text(json.dumps(sorted(set(_failed))))
