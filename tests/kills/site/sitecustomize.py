"""Loads one module of the product with a mutant in it, in every process of a run; `MUTANT` names both."""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

_NAME, _, _REST = os.environ.get("MUTANT", "").partition(" ")


class _Loader(SourceFileLoader):
    def get_code(self, fullname):
        sys.path.insert(0, str(Path(__file__).parents[2]))
        try:
            from kills.mutants import mutated
        finally:
            del sys.path[0]
        text = Path(self.path).read_text(encoding="utf-8")
        return compile(mutated(text, int(_REST)), self.path, "exec", dont_inherit=True)


class _Finder:
    @staticmethod
    def find_spec(fullname, path, target=None):
        if fullname != _NAME:
            return None
        file = Path(path[0], f"{fullname.rpartition('.')[2]}.py")
        return spec_from_file_location(fullname, file, loader=_Loader(fullname, str(file)))


if _NAME:
    sys.meta_path.insert(0, _Finder())
