"""Tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from ackstate.analysis.wording import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

# Width of a subscription at a terminal; a longer name wraps.
_NAME_WIDTH_MAX = 17


def subscription_table(title: str, subscriptions: Sequence[str], *numbers: str) -> Table:
    """Return a table whose first column is the subscription and the others numbers."""
    # Without the outer frame all columns of the demo fit into 80 characters.
    table = Table(title=title or None, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    # Rich would break names before it breaks sentences.
    width = max(cell_len(printable(name)) for name in ["subscription", *subscriptions])
    width = min(width, _NAME_WIDTH_MAX) if Console().is_terminal else width
    table.add_column("subscription", width=width, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", overflow="fold")
    return table


def new_table(*columns: str) -> Table:
    """Return an empty table whose cells are never cut."""
    table = Table(show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def numbers_table(first: str, others: Sequence[str]) -> Table:
    """Return an empty table whose first column is text and the others numbers."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table
