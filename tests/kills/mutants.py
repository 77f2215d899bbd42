"""Mutants of the product: where they are, how each is known after its code has moved, and its code."""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
_UNTOUCHED = {"__repr__", "__str__", "_check", "check_invariants"}
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


class Mutant(NamedTuple):
    """A change of one statement of one function.

    Attributes:
        name: The qualified name of the function, without its module.
        statement: The statement, normalised; of a compound one its head.
        change: The change.
        number: Which of the equal changes of equal statements of the function, from 0.
    """

    name: str
    statement: str
    change: str
    number: int

    @property
    def key(self) -> str:
        """A name that survives a move to another module."""
        return hashlib.sha256("\0".join(map(str, self)).encode()).hexdigest()[:16]


class Site(NamedTuple):
    """A mutant's place in a module as it is: the lines whose execution can tell, and the order of the change in it."""

    mutant: Mutant
    lines: range
    order: int


def sites(text: str) -> Iterator[Site]:
    """Yield the places of all mutants of a module."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for order, (name, statement, node, change) in enumerate(_changes(ast.parse(text))):
        head = _head(statement)
        known = name, head, change
        last = node.end_lineno if not isinstance(node, (ast.If, ast.While)) else node.test.end_lineno
        yield Site(Mutant(*known, counts[known]), range(node.lineno, last + 1), order)
        counts[known] += 1


def mutated(text: str, order: int) -> ast.Module:
    """Return the tree of a module with one change, whose lines are those of the text."""
    tree = ast.parse(text)
    _, _, node, change = next(each for number, each in enumerate(_changes(tree)) if number == order)
    kind = change.split(" ")[0]
    if kind == "compare":
        node.ops[0] = _SWAPPED[type(node.ops[0])]()
    elif kind == "operator":
        node.op = _SWAPPED[type(node.op)]()
    elif kind == "constant":
        node.value += 1
    elif kind == "negate":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        _replace(tree, node)
    return ast.fix_missing_locations(tree)


def find(root: Path) -> Iterator[tuple[Path, Site]]:
    """Yield the mutants of all modules of the product."""
    for path in sorted((root / "ackstate").rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            for site in sites(path.read_text(encoding="utf-8")):
                yield path, site


def _changes(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, ast.AST, str]]:
    """Yield the function, the statement, the node and the change of each mutant, in a fixed order."""
    for name, function in _functions(tree, ""):
        for statement in _statements(function):
            yield from ((name, statement, node, change) for node, change in _of_statement(statement))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not isinstance(child, ast.ClassDef) and child.name not in _UNTOUCHED:
                yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):
            yield from _functions(child, prefix)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a function, but not those of functions in it."""
    for field in _BODIES:
        for child in getattr(node, field, ()):
            if isinstance(child, ast.stmt):
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    continue
                yield child
            yield from _statements(child)


def _of_statement(statement: ast.stmt) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(statement, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
        return
    if isinstance(statement, (ast.If, ast.While)):
        yield statement, "negate"
    attribute = isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute)
    called = isinstance(statement, ast.Expr) and isinstance(statement.value, (ast.Call, ast.Await, ast.YieldFrom))
    if attribute or called or isinstance(statement, ast.AugAssign):
        yield statement, "delete"
    for node in _expressions(statement):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
            yield node, f"compare {_text(node)}"
        elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in _SWAPPED:
            yield node, f"operator {_text(node)}"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, f"constant {node.value}"
        elif isinstance(node, ast.IfExp):
            yield node, f"negate {_text(node.test)}"


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Walk a statement's own expressions: no statements in it, no annotations, no texts."""
    stack = [
        child for field, value in ast.iter_fields(statement) if field not in {*_BODIES, "annotation", "returns"}
        for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
    ]  # fmt: skip
    while stack:
        node = stack.pop()
        if not isinstance(node, (ast.JoinedStr, ast.stmt)):
            yield node
            stack += reversed(list(ast.iter_child_nodes(node)))


def _head(statement: ast.stmt) -> str:
    return ast.unparse(statement).split("\n", 1)[0][:200]


def _text(node: ast.AST) -> str:
    return ast.unparse(node).replace("\n", " ")[:120]


def _replace(tree: ast.Module, target: ast.AST) -> None:
    for node in ast.walk(tree):
        for field in _BODIES:
            body = getattr(node, field, None)
            if isinstance(body, list) and target in body:
                body[body.index(target)] = ast.copy_location(ast.Pass(), target)
                return
