"""The names of `ackstate.cursor` are there when they are used, and cost nothing before."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ackstate.cursor
from ackstate import LedgerMap, Position
from ackstate.cursor import ManagedCursor, MemoryStore


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


@pytest.mark.parametrize("former", ["message_log", "journal_format"])
def test_documented_names_can_still_be_imported_from_their_former_modules(former):
    module = import_module(f"ackstate.cursor.{former}")
    for name in module.__all__:
        with pytest.warns(DeprecationWarning, match=f"write ackstate.cursor.{name}$") as warned:
            assert getattr(module, name) is getattr(ackstate.cursor, name)
        assert warned[0].filename == __file__


def test_what_moved_to_the_view_and_the_reader_is_found_under_its_former_name():
    cursor = ManagedCursor.open(
        MemoryStore(), topic="t", subscription="s", ledgers=LedgerMap.from_counts({3: 9}), now_ms=0
    )
    cursor.ack(Position(3, 2), now_ms=0)
    with pytest.warns(DeprecationWarning, match=r"write ManagedCursor.view.unpersisted_record_bytes$") as warned:
        assert cursor.unpersisted_record_bytes == cursor.view.unpersisted_record_bytes > 0
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"write ManagedCursor.view.holes$"):
        assert cursor.holes() == cursor.view.holes() != []
    with pytest.warns(DeprecationWarning, match=r"write ManagedCursor.reader.read$"):
        assert cursor.read(1) == [Position(3, 0)]
    with pytest.warns(DeprecationWarning, match=r"write ManagedCursor.attached.put_internal$"):
        cursor.put_internal_property("#pulsar.internal.x", "y")
    with pytest.raises(AttributeError, match="no attribute 'undurable'"):
        _ = cursor.undurable


def test_the_former_names_of_enums_are_found():
    for former, name in (("Route", "PersistTarget"), ("Source", "RecoverySource")):
        with pytest.warns(DeprecationWarning, match=f"write ackstate.cursor.{name}$") as warned:
            assert getattr(ackstate.cursor, former) is getattr(ackstate.cursor, name)
        assert warned[0].filename == __file__
