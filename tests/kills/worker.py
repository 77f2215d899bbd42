"""A pytest plugin: notes the lines that each test executes, or runs tests on mutants, each in a forked child.

`KILLS_LINES=FOLDER` measures the lines of the product's modules. `KILLS_SOCKET=PATH` asks there for work: a child gets
the mutant's code in place of the functions that are loaded already, so that nothing is imported or collected again.
"""

import functools
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from kills.mutants import mutated

ROOT = Path(__file__).resolve().parents[2]
_LINES, _SOCKET = os.environ.get("KILLS_LINES"), os.environ.get("KILLS_SOCKET")
_failed, _seconds = [], {}
_firsts = []
"""The first quick test of each module."""

if _LINES:
    import coverage

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

    def pytest_runtest_logreport(report):
        _seconds[report.nodeid] = _seconds.get(report.nodeid, 0) + report.duration
        if report.failed:
            _failed.append(report.nodeid)

    def pytest_unconfigure(config):
        if hasattr(config, "workerinput"):
            _coverage.stop()
            _coverage.save()
            Path(_LINES, f"tests.{os.getpid()}.json").write_text(json.dumps([_seconds, _failed]))


if _SOCKET:

    @pytest.hookimpl(trylast=True)
    def pytest_configure(config):
        """Let a property that fails end there: shrinking its example takes minutes."""
        found = settings.get_profile(os.environ["HYPOTHESIS_PROFILE"])
        settings.register_profile("kills", found, phases=(Phase.explicit, Phase.generate), database=None)
        settings.load_profile("kills")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(session):
        for module in pkgutil.walk_packages([str(ROOT / "ackstate")], "ackstate."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        tests = {item.nodeid: item for item in session.items}
        quick = [
            each
            for each in session.items
            if not (each.get_closest_marker("slow") or getattr(each.obj, "is_hypothesis_test", False))
        ]
        _firsts.extend({item.path: item for item in reversed(quick)}.values())
        for item in _firsts:  # begins the fixtures of the session, and fills caches
            _fails(item)
        loaded = _loaded()
        gc.freeze()
        with Client(_SOCKET, family="AF_UNIX") as connection:
            connection.send(list(tests))
            while job := connection.recv():
                *place, names, failed_max, seconds = job
                connection.send(_in_child(place, [tests[name] for name in names], failed_max, seconds, loaded))
        return True


def _fails(item):
    item._initrequest()
    another = next(each for each in _firsts if each.path != item.path)  # what the session shares stays
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=another))


def _loaded():
    """Return the product's functions by file, name and line, and its caches."""
    gc.unfreeze()
    functions, caches = {}, []
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(f"{ROOT}/ackstate"):
            functions.setdefault(_place(each.__code__), []).append(each)
        elif isinstance(each, functools._lru_cache_wrapper) and each.__module__.startswith("ackstate"):
            caches.append(each)
    return functions, caches


def _place(code):
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _changed(old, new):
    """Yield the pairs of code objects that differ, those inside others too."""
    inner = [[each for each in code.co_consts if isinstance(each, CodeType)] for code in (old, new)]
    for before, after in zip(*inner, strict=False):
        if before != after:
            yield before, after
            yield from _changed(before, after)


def _plant(path, order, functions, caches):
    file = str(ROOT / path)
    text = Path(file).read_text(encoding="utf-8")
    old, new = (compile(each, file, "exec", dont_inherit=True) for each in (text, mutated(text, order)))
    for before, after in _changed(old, new):
        for function in functions.get(_place(before), ()):
            if len(before.co_freevars) == len(after.co_freevars):
                function.__code__ = after
    for cache in caches:
        cache.cache_clear()


def _in_child(place, items, failed_max, seconds, loaded):
    """Return the names of the tests that fail on a mutant, at most so many, and of the one that does not end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))
        try:
            _plant(*place, *loaded)
            for item in items:
                os.write(writer, f"begun {item.nodeid}\n".encode())
                is_failed = _fails(item)
                os.write(writer, f"{'failed' if is_failed else 'passed'} {item.nodeid}\n".encode())
                failed_max -= is_failed
                if not failed_max:
                    break
        finally:
            os._exit(0)
    os.close(writer)
    said, until, ended = b"", time.monotonic() + 2 * seconds, os.pidfd_open(pid)
    # Not until the pipe ends: a process that a test left behind has it, too.
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select([reader, ended], [], [], left)
        if reader in ready and (part := os.read(reader, 1 << 16)):
            said += part
        elif ready:
            break
    os.close(reader)
    os.close(ended)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    lines = [line.split(" ", 1) for line in said.decode().splitlines()]
    ended = {name for word, name in lines if word != "begun"}
    return [name for word, name in lines if word == "failed" or (word == "begun" and name not in ended)]
