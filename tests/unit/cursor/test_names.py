"""The names of the packages."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version

import pytest

PACKAGES = [
    "ackstate",
    *(f"ackstate.{each}" for each in ("aio", "cursor", "delay", "dispatch", "limits", "stores", "topic")),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_name_can_be_imported_and_is_one_object_everywhere(package):
    module, top = import_module(package), import_module("ackstate")
    for name in module.__all__:
        assert getattr(top, name, getattr(module, name)) is getattr(module, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_can_be_imported_first(package):
    subprocess.run([sys.executable, "-P", "-c", f"import {package}"], check=True)


def loaded_after(code):
    command = [sys.executable, "-P", "-c", f"import ackstate, sys; {code}; print(*sys.modules)"]
    return {*subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()}


def test_the_library_loads_neither_the_web_nor_spark_nor_java_nor_what_an_extra_has():
    loaded = loaded_after("[getattr(ackstate, each) for each in ackstate.__all__ if each != 'BookKeeperStore']")
    assert loaded >= {"ackstate.aio", "ackstate.topic.topics", "ackstate.stores.sqlite"}
    assert not {"pyspark", "pandas", "pyarrow", "fastapi", "starlette", "uvicorn", "httpx", "jpype", "kazoo"} & loaded


def test_a_name_loads_what_it_needs_when_it_is_used():
    assert not {each for each in loaded_after("pass") if each.startswith(("ackstate.", "numpy", "asyncio"))}
    assert not {"sqlite3", "ackstate.cursor", "ackstate.topic"} & loaded_after("ackstate.DeletedRanges()")
    assert "ackstate.stores.memory" in loaded_after("ackstate.stores")


def test_all_names_are_shown_and_no_other_is_found():
    package = import_module("ackstate")
    assert {*dir(package)} >= {*package.__all__}
    with pytest.raises(AttributeError, match="'ackstate' has no attribute 'Cursor'"):
        package.Cursor  # noqa: B018


def test_the_store_of_an_extra_names_it_if_it_is_not_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "ackstate.stores.bookkeeper", raising=False)
    monkeypatch.setitem(sys.modules, "ackstate.stores.zookeeper", None)
    with pytest.raises(ImportError, match=r"ackstate\[bookkeeper\]"):
        import_module("ackstate").BookKeeperStore  # noqa: B018


def test_the_version_is_that_of_the_distribution():
    assert import_module("ackstate").__version__ == version("ackstate")
