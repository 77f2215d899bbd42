"""`ackstate migrate` rewrites traces and daily states of older releases in the present versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import JsonOption, location_argument
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from ackstate.analysis.estimate.former_state import FormerState
    from ackstate.analysis.location import Location


class _Source(NamedTuple):
    """The contents of a path.

    Attributes:
        what: Its kind.
        version: Its version; 0 for several.
        current: The version that a migration writes.
        note: Why nothing is rewritten; empty if something must be.
        state: Its policies and days, if it is a daily state.
    """

    what: str
    version: int
    current: int
    note: str = ""
    state: FormerState | None = None


def migrate(
    source: Annotated[
        Any, typer.Argument(metavar="SOURCE", parser=location_argument, help="A daily state, or a Parquet trace.")
    ],
    target: Annotated[
        Any,
        typer.Argument(
            metavar="[TARGET]",
            parser=location_argument,
            show_default=False,
            help="The new one; nothing is there.",
        ),
    ] = None,
    traces: Annotated[
        Any,
        typer.Option(metavar="DIR", parser=location_argument, help="The daily traces from which a state was computed."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    json: JsonOption = False,
) -> None:
    """Rewrite a trace or a daily state of an older release in the present version.

    SOURCE is only read. TARGET appears when it is complete, and if the command
    dies, it can be repeated. A daily state is computed again from --traces.
    Stores and recordings need no migration.

    Exit status: 0 written, or nothing to do, 2 not possible.
    """
    found = _found(source)
    done = found._replace(note=found.note or ("" if dry_run else _written(source, target, traces, found)))
    if dry_run and not found.note and found.state is not None and traces is not None:
        from ackstate.analysis.estimate.former_state import check_days

        check_days(found.state, traces)
    is_needed = not found.note
    text = done.note or _intention(found)
    if json:
        answer = {"source": str(source), "what": found.what, "version": found.version, "current": found.current}
        written = str(target) if is_needed and not dry_run else None
        console.write_json(answer | {"is_needed": is_needed, "target": written, "text": text})
    else:
        version = f" of version {found.version}" if found.version else ""
        console.show(f"{source}: {found.what}{version}: {text}")


def _found(source: Location) -> _Source:
    """Return the contents of a path.

    Raises:
        AckStateError: It holds nothing that ackstate has written, or something damaged, or of a newer release.
    """
    from ackstate.analysis.estimate.former_state import find_state
    from ackstate.analysis.replay.state_fields import VERSION

    if not source.exists():
        raise AckStateError(f"{source}: no such file or directory")
    state = find_state(source)
    if state is not None:
        note = "nothing to do" if state.version == VERSION else ""
        return _Source("daily state", state.version, VERSION, note, state)
    names = {each.name for each in source.iterdir()} if source.is_dir() else {source.name}
    if any(name.endswith(".parquet") for name in names):
        return _trace(source)
    if any(name.endswith(".events") for name in names):
        return _Source("recording", 0, 0, "nothing to do; ackstate trace convert reads every version")
    if {"ackstate.sqlite3", "MADE"} & names or any(name.startswith("log-") for name in names):
        return _Source("store", 0, 0, "nothing to do; an open rewrites older parts itself (docs/compatibility.md)")
    raise AckStateError(f"{source}: neither a daily state nor a trace, a recording or a store")


def _trace(source: Location) -> _Source:
    from ackstate.analysis.trace.events import INTERVAL_VERSION, TRACE_VERSION
    from ackstate.analysis.trace.parquet import check_trace, version_of

    span = check_trace(source)
    if span.has_intervals:
        return _Source("trace of polls", INTERVAL_VERSION, INTERVAL_VERSION, "nothing to do")
    return _Source("trace", version_of(source), TRACE_VERSION, "nothing to do" if span.is_packed else "")


def _intention(found: _Source) -> str:
    if found.state is None:
        return f"its events are to be written in version {found.current}"
    days, policies = found.state.days, found.state.policies
    labels = ", ".join("as recorded" if each is None else each.label for each in policies)
    return f"{found.state.day_count} days up to {list(days)[-1]} are to be replayed ({labels})"


def _written(source: Location, target: Location | None, traces: Location | None, found: _Source) -> str:
    """Write the target, and describe it."""
    if target is None:
        raise typer.BadParameter("TARGET is missing; --dry-run needs none")
    if (target.is_dir() and any(not each.name.startswith(".") for each in target.iterdir())) or target.is_file():
        raise AckStateError(f"{target}: it exists; a migration replaces nothing")
    if found.state is None:
        from ackstate.analysis.trace.rewrite import rewrite_trace

        return f"{rewrite_trace(source, target):,} events written in version {found.current} to {target}"
    if traces is None:
        raise typer.BadParameter(
            f"a state of version {found.version} is computed again from its daily traces: name them with --traces"
        )
    from ackstate.analysis.estimate.former_state import replay_again

    days = replay_again(found.state, traces, target)
    return f"{len(days)} days up to {days[-1]} replayed into {target}"
