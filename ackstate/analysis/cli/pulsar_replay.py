"""`ackstate pulsar replay` predicts which acked messages killed brokers delivered again, from their ACK commands."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ackstate.analysis.cli import console
from ackstate.analysis.cli.options import duration_option, path_argument
from ackstate.analysis.durations import Duration
from ackstate.analysis.pulsar.policy_name import PolicyName
from ackstate.analysis.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.analysis.pulsar.recorded_run import Made


def replay(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            parser=path_argument,
            help="Recorded runs, one a line; .gz is gzip. Or a recording of the broker interceptor, maybe a directory.",
        ),
    ],
    policy: Annotated[
        PolicyName, typer.Option(help="All but the first are wrong on purpose, for comparison.")
    ] = PolicyName.PULSAR_4,
    ledger_creation: Annotated[
        Duration | None,
        duration_option(
            "--ledger-creation-ms",
            plain_unit="ms",
            most="10m",
            help="Longest creation of a cursor ledger, if FILE lacks it; else learned from each run.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object a run, one a line.")] = False,
) -> None:
    """Predict which acked messages killed Pulsar 4.2 brokers delivered again.

    FILE holds the input of each broker until it was killed: every ACK command,
    with the times of its receipt and its handling. Clock uncertainty makes
    the prediction an interval, and a list of sets.

    If FILE does not mark cumulative acks, the answer covers both readings,
    with a remark.

    If FILE has the messages that were really redelivered, the table shows
    whether the prediction covers them, and the exit status is 1 if not. The
    prediction itself never reads them.
    """
    from ackstate.analysis.pulsar.recorded_run import parse_run
    from ackstate.analysis.pulsar.replay import predict
    from ackstate.analysis.pulsar.replay_table import ack_type_remark, judge, summary_line, verdict_table
    from ackstate.analysis.trace.broker_recording import recording_files

    ledger_creation_ms = None if ledger_creation is None else ledger_creation.ms
    if file.exists() and (files := recording_files(file)):
        _replay_recording(files, policy, ledger_creation_ms=ledger_creation_ms, json=json)
        return
    # All runs are replayed before the first is printed: an error in the last line must not leave half an answer.
    if json:
        predictions = _of_each(
            file, lambda line: predict(parse_run(line), policy, ledger_creation_ms=ledger_creation_ms)
        )
        console.write("".join(f"{json_format.dumps(asdict(each))}\n" for each in predictions))
        return
    verdicts = _of_each(file, lambda line: judge(line, policy, ledger_creation_ms=ledger_creation_ms))
    remark = ack_type_remark([verdict.prediction for verdict in verdicts])
    console.show(verdict_table(verdicts), summary_line(verdicts), *filter(None, [remark]))
    if any(verdict.measured is not None and not verdict.is_inside for verdict in verdicts):
        raise typer.Exit(1)


def _replay_recording(files: list[Path], policy: PolicyName, *, ledger_creation_ms: float | None, json: bool) -> None:
    from ackstate.analysis.pulsar.broker_replay import broker_table, predict_broker_runs, remarks

    with console.progress() as progress:
        task = progress.add_task("", total=None)
        found = []
        for each in predict_broker_runs(files, policy, ledger_creation_ms=ledger_creation_ms):
            found.append(each)
            progress.update(task, description=f"{counted(len(found), 'run')} replayed")
    if json:
        console.write("".join(f"{json_format.dumps(each.to_json())}\n" for each in found))
    else:
        console.show(broker_table(found), *remarks(found))


def _of_each(file: Path, work: Callable[[str], Made]) -> list[Made]:
    from ackstate.analysis.pulsar.recorded_run import for_each_line

    found = []
    with console.progress() as progress:
        task = progress.add_task("", total=None)
        for each in for_each_line(file, work):
            found.append(each)
            progress.update(task, description=f"{counted(len(found), 'run')} replayed")
    return found
