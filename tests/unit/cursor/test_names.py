"""The names of the packages."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

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


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="module 'ackstate' has no attribute 'ManagedCurser'"):
        import_module("ackstate").ManagedCurser  # noqa: B018
