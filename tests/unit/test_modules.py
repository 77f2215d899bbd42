"""Each module is small, and each class name has one meaning."""

import ast
import os
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
FOLDERS = ("ackstate", "limits", "delay", "cursor", "analysis", "website", "benchmarks", "examples")
TESTS = ("tests",)
GENERATED = ("_pb2.py",)
LINES_MAX = 400
CLASS_LINE = re.compile(r"^class (\w+)", re.MULTILINE)

pytestmark = pytest.mark.skipif(not (ROOT / "cursor").is_dir(), reason="a source distribution has other folders")


@cache
def sources(folders=FOLDERS):
    """Return the text of each module: name -> text. Links are not followed."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in folders
        for directory, _, files in os.walk(ROOT / folder)
        for path in (Path(directory, file) for file in files if file.endswith(".py"))
        if not path.name.endswith(GENERATED)
    }


def too_long(texts):
    return [name for name, text in texts.items() if text.count("\n") > LINES_MAX]


def defined_twice(texts):
    """Return the classes of the top level that several modules define: name -> modules."""
    modules = defaultdict(dict)
    for name, text in texts.items():
        for line in CLASS_LINE.finditer(text):
            modules[line[1]][name] = text
    # A program in a string has such lines, too. Parsing all modules would take seconds.
    defined = {
        each: [name for name, text in found.items() if each in classes_of(text)]
        for each, found in modules.items()
        if len(found) > 1
    }
    return {each: names for each, names in defined.items() if len(names) > 1}


def classes_of(text):
    return {node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}


def test_no_module_is_longer_than_400_lines():
    assert too_long(sources()) == []


def test_no_class_name_is_defined_in_two_modules():
    assert defined_twice(sources(FOLDERS + TESTS)) == {}


def test_a_long_module_and_a_second_class_are_seen():
    planted = {"a.py": "\n" * 401, "b.py": "class Store: pass\n", "c.py": "class Store: pass\n"}
    assert too_long(planted) == ["a.py"]
    assert defined_twice(planted) == {"Store": ["b.py", "c.py"]}
