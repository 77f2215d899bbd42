"""What is frozen: each part is a generator of (file below `answers`, its content, its content by Spark or None)."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir, contextmanager
from pathlib import Path

from frozen.command import HERE, ROOT, TRACES, answer_of, outcome_of
from frozen.inside import again, journal_of

VECTORS, GOLDEN = ROOT / "tests" / "vectors", ROOT / "tests" / "golden"
RUNS = {
    "recorded": "redelivery",
    "policy": "redelivery --policy flush_interval_ms=900 --policy tick_ms=70 --crashes-per-day 3",
    "usual": "sweep",
    "intervals": "sweep --flush-interval-ms 0ms,200ms,5s --current-policy default",
    "ranges": "sweep --set flush_interval_ms=600 --set range_count_max=3,40 --set keep=LOWEST,WIDEST "
    "--current-policy recorded",
    "young": "sweep --set become_old_ack_record_seconds=1,4 --set range_count_max=none,10",
    "gate": "sweep --set max_unpersisted_ack_record_bytes=1037,4096 --set become_old_ack_record_seconds=0,2",
    "metadata": "sweep --set ledger_writable=false --set format=NATIVE,PULSAR --set metadata_range_count_max=2,none "
    "--set metadata_bytes_max=100,200",
    "journal": "sweep --set compaction_bytes_min=200 --set ledger_entry_count_max=3,50000 "
    "--set range_count_max=none,50",
    "broker": "sweep --broker-conf broker.conf",
    "pulsar": "sweep --set format=PULSAR --set range_form=WORDS,LIST --set range_count_max=5,10000 "
    "--set flush_interval_ms=1500",
    "pulsar rules": "sweep --set format=PULSAR --set range_limit_rule=PULSAR_4_2,PULSAR_5_0 --set range_count_max=5 "
    "--set compression=LZ4 --set mark_delete_rate_limit=1,10",
}
BROKER_CONF = """managedLedgerCursorPositionFlushSeconds=2
managedLedgerDefaultMarkDeleteRateLimit=0.5
managedLedgerMaxUnackedRangesToPersist=8
"""
NOT_RUN = {"quiet_and_long": {"gate", "metadata", "broker", "pulsar", "pulsar rules"}}
"""A range of it has 4 billion messages: too many for a gate, which sends them one by one, and for Pulsar's words."""


@contextmanager
def emptied():
    """Work in an empty directory, so that answers name no place of this machine."""
    with tempfile.TemporaryDirectory(prefix="ackstate-frozen-") as directory, chdir(directory):
        yield Path(directory)


def traces():
    """The twelve traces: what each policy redelivers, in both engines."""
    with emptied():  # One for all: Spark's workers stay where they began.
        Path("broker.conf").write_text(BROKER_CONF)
        for file in sorted(TRACES.glob("*.jsonl.gz")):
            name = file.name.partition(".")[0]
            shutil.copy(file, "lines.jsonl.gz")
            converted = json.loads(answer_of("trace convert", "lines.jsonl.gz", name, "--json"))
            checked = json.loads(answer_of("trace check", name, "--json"))
            del checked["sha256"]
            known = {"convert": converted, "check": checked}
            yield f"traces/{name}.json", *({**known, **_replayed(name, engine)} for engine in ("local", "spark"))


def _replayed(name, engine):
    found = {}
    for run, text in RUNS.items():
        command, *words = text.split()
        if run not in NOT_RUN.get(name, ()):
            found[run] = json.loads(answer_of(command, name, "--json", "--engine", engine, *words))
    for run, answer in found.items():
        if run not in ("recorded", "usual"):  # These have the recording, which each sweep repeats.
            answer["policies"] = [each for each in answer["policies"] if each["policy"] is not None]
    return found


def conversions():
    """Every file of real brokers that becomes a trace: its counts, its hash, its redelivery."""
    found = {}
    for source in sorted([*VECTORS.glob("broker-redelivery*.jsonl.gz"), *(VECTORS / "interceptor").iterdir()]):
        with emptied():
            name = source.name.partition(".")[0]
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, f"source-{source.name}")
            status, converted, _ = outcome_of("trace convert", f"source-{source.name}", name, "--json")
            found[name] = {"status": status}
            if status:
                continue
            found[name]["convert"] = json.loads(converted)
            found[name]["check"] = json.loads(answer_of("trace check", name, "--json"))
            for run, words in {"recorded": [], "policy": ["--policy", "flush_interval_ms=1000"]}.items():
                found[name][run] = json.loads(answer_of("redelivery", name, "--json", "--engine", "local", *words))
    yield "conversions.json", found, None


def formats():
    """The bytes of each format: golden files, read and written again, journals, recordings of Pulsar."""
    golden = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(GOLDEN.glob("*.*"))}
    vectors = {}
    for file in sorted(VECTORS.glob("*.jsonl*")):
        data = file.read_bytes()
        text = gzip.decompress(data) if file.suffix == ".gz" else data
        vectors[file.name] = {"cases": text.count(b"\n"), "sha256": hashlib.sha256(data).hexdigest()}
    yield "formats.json", {"golden": golden, "again": again(GOLDEN), "journals": journal_of(), "vectors": vectors}, None


USER = f"{sys.executable} -P {HERE / 'subject.py'}"
SUBJECTS = {
    "naive": ("naive", "L2 L3 L4"),
    "ours": ("ours", "L2 L3 L4"),
    "a user's": (f"{USER} sound", "L2 L3 L4"),
    "a user's that never syncs": (f"{USER} unsynced", "L3 L4"),
    "a user's that promises too early": (f"{USER} early", "L2 L3"),
}


def verdicts():
    """The crash harness on a naive subject, on ours, and on a user's: which promise each layer sees broken."""
    found = {}
    for name, (subject, layers) in SUBJECTS.items():
        for layer in layers.split():
            command = f"crash --layer {layer} --seed 1 --runs 4 --budget 2m --json --subject".split()
            done = subprocess.run(
                [Path(sys.executable).with_name("ackstate"), *command, subject],
                env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            (told,) = json.loads(done.stdout)["layers"] if done.stdout else ({},)
            # The first is that of a lost receipt, I2; whether others are seen beside it depends on the moments.
            broken = min((failure["promise"].partition(":")[0] for failure in told.get("failures", ())), default="none")
            found.setdefault(name, {})[layer] = {"status": done.returncode, "broken": broken} | {
                why: True for why in ("skipped", "untested") if told.get(why)
            }
    yield "verdicts.json", found, None


def kill_matrix(measured=ROOT / "tests" / "museum" / "matrix.json"):
    """Which layer kills which exhibit of the museum, as measured last."""
    rows = json.loads(measured.read_text(encoding="utf-8"))
    yield (
        "kill_matrix.json",
        {name: {layer: row[layer]["fate"] for layer in sorted(row)} for name, row in rows.items()},
        None,
    )


def kill_matrix_run():
    """The same, by running the museum again, which takes half an hour."""
    with tempfile.TemporaryDirectory(prefix="ackstate-frozen-") as out:
        subprocess.run([sys.executable, "-P", "-m", "museum.matrix", "--out", out], cwd=ROOT, check=False)
        yield from kill_matrix(Path(out) / "matrix.json")


def commands():
    """Every command with its options and arguments, as the help names them."""
    yield "commands.txt", list(_commands_below("")), None


def _commands_below(command):
    status, text, _ = outcome_of(command, "--help")
    assert not status, command
    section, names = "", {"Arguments": [], "Options": [], "Commands": []}
    for line in text.splitlines():
        if line and not line.startswith(" "):
            section = line.rstrip(":")
        elif (found := re.match(r"  (\S.*?)(  |$)", line)) and section in names:
            words = found[1].replace(",", " ").split()
            names[section] += [word for word in words if word.startswith("-")] if section == "Options" else words[:1]
    yield " ".join(["ackstate", *command.split(), *names["Arguments"], *sorted(names["Options"])])
    for name in names["Commands"]:
        yield from _commands_below(f"{command} {name}".strip())


PARTS = {part.__name__: part for part in (traces, conversions, formats, verdicts, kill_matrix, commands)}
