"""Writes answers, such as tables, to standard output, and progress and errors to standard error.

Names come from stores, traces and brokers, and may hold what controls a terminal. So all text is escaped here, where it
is written, and nowhere before; only `write` takes text that is ready, such as JSON.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import textwrap
from io import StringIO
from typing import TYPE_CHECKING, Any, final

from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ackstate.analysis.wording import printable
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Sequence


_WIDTH_MAX = 10**15
_PIPE_STATUS = 128 + 13  # as a shell says it of a program that SIGPIPE has ended


def progress(*, auto_refresh: bool = True) -> Progress:
    """Return a progress display on standard error, shown only on a terminal."""
    is_terminal = Console(stderr=True).is_terminal
    # Quiet, because some releases of Rich end a progress that was never shown with an empty line.
    console = Console(stderr=True, quiet=not is_terminal)
    columns = (_Description(), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not is_terminal, auto_refresh=auto_refresh)


@final
class _Description(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Return the description of a task."""
        return Text(printable(task.description))


def show(*parts: Table | str) -> None:
    """Write tables and lines to standard output; no cell is ever cut, and none is wrapped unless a terminal reads."""
    for part in parts:
        if isinstance(part, Table):
            _escape_cells(part)
    parts = tuple(part if isinstance(part, Table) else printable(part) for part in parts)
    screen = Console()
    width = screen.width
    if not screen.is_terminal:
        unlimited = screen.options.update(max_width=_WIDTH_MAX)
        width = max(width, *(screen.measure(part, options=unlimited).maximum for part in parts))
    text = StringIO()
    console = Console(file=text, width=width, force_terminal=screen.is_terminal)
    for part in parts:
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))
    write(text.getvalue())


def _escape_cells(table: Table) -> None:
    for column in table.columns:
        column._cells = [printable(cell) if isinstance(cell, str) else cell for cell in column.cells]


def lines(sentence: str) -> list[str]:
    """Break a sentence into lines that fit a terminal; one line if none reads."""
    screen = Console()
    return textwrap.wrap(sentence, screen.width) if screen.is_terminal else [sentence]


def json_text(value: Any) -> str:
    """Return JSON as commands print it."""
    return json.dumps(value, indent=2) + "\n"


def write_json(value: dict[str, Any]) -> None:
    """Write one object to standard output."""
    write(json_text(value))


def write(text: str) -> None:
    """Write to standard output and flush, so that a failure can still be reported."""
    if sys.stdout is None:
        raise AckStateError("standard output is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Text left in the buffer would fail once more, with a traceback, when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # The reader, such as `head`, has enough.
            raise SystemExit(_PIPE_STATUS) from None
        raise AckStateError(f"standard output: {os_error_text(error)}") from error


def complain(message: str) -> None:
    """Write one line to standard error."""
    if sys.stderr is not None:
        sys.stderr.write(f"ackstate: {printable(' '.join(message.split()))}\n")


def os_error_text(error: OSError) -> str:
    """Return an error as one line."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"{where}the disk is full"
    return f"{where}{error.strerror or error}"


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
