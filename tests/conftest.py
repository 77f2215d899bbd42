"""Hypothesis profiles, chosen by HYPOTHESIS_PROFILE, of which an unknown name stops the run; and shared fixtures."""

import asyncio
import faulthandler
import gc
import inspect
import os
import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

_SLOW_MACHINES = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=_SLOW_MACHINES)
settings.register_profile(
    "ci",
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=_SLOW_MACHINES,
)
settings.register_profile(
    "nightly",
    max_examples=int(os.environ.get("NIGHTLY_EXAMPLES", "5000")),
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=_SLOW_MACHINES,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Started in the background, a shell's children ignore interrupts, and so would every process that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Fixtures, or marks of tests whose commands start the same.


@pytest.fixture
def store():
    from ackstate import MemoryStore

    return MemoryStore()


@pytest.fixture
def bucketed():
    """Return the settings of a bucketed delay index with small buckets."""
    from ackstate.delay import DelayConfig, TrackerKind

    return DelayConfig(tracker=TrackerKind.BUCKETED, min_index_count_per_bucket=2, max_indexes_per_segment=2)


@pytest.fixture(params=["in memory", "bucketed"])
def delay_index(request, bucketed):
    """Return the settings of each kind of delay index that a topic may have."""
    from ackstate.delay import DelayConfig

    return DelayConfig() if request.param == "in memory" else bucketed


SLOW_TO_START = ("spark", "bookkeeper_cluster", "browser")


class DoctestSearch:
    """Searches doctests only in the modules that have some: importing all others takes seconds in each process."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self):
        collected = yield
        return [each for each in collected if not isinstance(each, DoctestModule) or has_doctests(each.path)]


def has_doctests(path):
    """Return whether a module shows an example. The tests have none, though strings with such lines."""
    return not path.is_relative_to(Path(__file__).parent) and b">>>" in path.read_bytes()


def pytest_configure(config):
    """Register the hooks that apply to all folders; those of this file apply to its own."""
    config.pluginmanager.register(DoctestSearch())


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Give pytest-xdist groups that stay in one process: tests with the same slow fixture, or of one module."""

    def shared(item):
        # Commands that use Spark in this process leave its virtual machine, which the next test with Spark finds.
        return [name for name in SLOW_TO_START if name in item.fixturenames or item.get_closest_marker(name)]

    for item in items:
        item.add_marker(pytest.mark.xdist_group((shared(item) or [item.path.stem])[0]))
    # The longest groups begin first, so that none is left when all others have ended.
    items.sort(key=lambda item: not shared(item))
    result = yield
    if getattr(config.option, "loadgroup", False) and not all("@" in item.nodeid for item in items):
        raise pytest.UsageError("the groups of pytest-xdist have no effect: its release does not fit that of pytest")
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 300))
    return True


def pytest_collection_finish():
    """Spare the garbage collector the thousands of tests, which it would traverse again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def spark():
    """One Spark session for all tests that need it."""
    from ackstate.analysis.spark.session import local_session

    session = local_session()
    yield session
    session.stop()


@pytest.fixture(scope="session")
def bookkeeper_cluster(tmp_path_factory):
    """Yield a cluster of three bookies; a test that kills one revives it."""
    from crash.bookkeeper_cluster import JARS, running_cluster

    if not any(JARS.glob("*.jar")):
        pytest.skip("BookKeeper's jars are missing: bash .ci/setup bookkeeper")
    # This process will start Java, which meets memory faults in normal work and handles them itself: by JPype's guide
    # Python's handler must not be there before. Java writes a log if it crashes.
    faulthandler.disable()
    with running_cluster(tmp_path_factory.mktemp("bookkeeper")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def bookkeeper_client(bookkeeper_cluster):
    """Yield a client of that cluster for all stores of a run: starting its Java takes seconds."""
    from crash.bookkeeper_cluster import bookkeeper_options

    with closing(bookkeeper_options().connect(bookkeeper_cluster.hosts, call_timeout_s=30)) as client:
        yield client


@pytest.fixture(scope="session")
def killed(tmp_path_factory):
    """Return the directory that a killed broker left; copy it before changing it."""
    from command_line import killed_broker

    return killed_broker(tmp_path_factory.mktemp("killed") / "broker").path


@pytest.fixture
def broker(killed, tmp_path):
    """Return a copy of that directory."""
    return shutil.copytree(killed, tmp_path / "broker")


@pytest.fixture(scope="session")
def good_trace(killed, tmp_path_factory):
    """Return the one file of a sound trace; copy it before changing it."""
    from ackstate.analysis.trace.parquet import write_trace
    from ackstate.analysis.trace.recording import read_recording

    path = tmp_path_factory.mktemp("good") / "trace"
    write_trace(read_recording(killed / "recording"), path)
    return path / "part-00000.parquet"
