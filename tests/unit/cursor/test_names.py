"""The names of `ackstate.cursor` are there when they are used, and cost nothing before."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ackstate.cursor


def test_each_name_is_where_type_checkers_see_it():
    (seen,) = [node for node in ast.parse(Path(ackstate.cursor.__file__).read_text()).body if isinstance(node, ast.If)][
        :1
    ]
    homes = {alias.name: node.module for node in seen.body for alias in node.names}
    assert sorted(homes) == sorted(ackstate.cursor.__all__)  # Ruff sorts them differently.
    for name, home in homes.items():
        assert getattr(ackstate.cursor, name) is getattr(sys.modules[home], name)


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match=r"'ackstate\.cursor' has no attribute 'ManagedCurser'"):
        _ = ackstate.cursor.ManagedCurser


def test_a_module_is_imported_when_one_of_its_names_is_used():
    code = "import sys, ackstate.cursor; print('ackstate.cursor.managed' in sys.modules); ackstate.cursor.ManagedCursor"
    code += "; print('ackstate.cursor.managed' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
