"""The kill ledger: which test notices which change of the product. `python -m kills --help`.

`lines` runs the tests and notes the lines that each executes, into out/kills; `run` plants the ledger's mutants,
one at a time, in front of the tests that execute their lines, and notes which fail; it goes on where it stopped.
`check` expects a killer of each mutant that was killed, and whose statement still exists, to fail again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from kills import forked
from kills.mutants import find

ROOT = Path(__file__).resolve().parents[2]
LEDGER = Path(__file__).with_name("ledger.json")
MEASURED = ROOT / "out" / "kills"
ANALYSIS = "ackstate/analysis/"
TESTS = ("tests/unit", "tests/model", "tests/system/cursor/test_store_conformance.py")
MUTANT_COUNT, ANALYSIS_COUNT = 2_000, 300
OPTIONS = ("-q", "--assert=plain", "-p", "kills.plugin", "-p", "no:cacheprovider", "--tb=no")
KILLERS_MAX = 3
SECONDS_MAX = 5.0
"""Of the tests that are run on one mutant, as measured with their lines."""
FIRST_COUNT = 12
"""Tests that are run first: most mutants die by them."""


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m kills", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lines")
    for name in ("run", "check"):
        command = commands.add_parser(name)
        command.add_argument("--minutes", type=float, default=60)
        command.add_argument("--sample", type=int, help="so many of the mutants, not all")
        if name == "run":
            command.add_argument("--alive", action="store_true", help="those that live, on all tests of their lines")
    chosen = parser.parse_args(arguments)
    return {"lines": measure, "run": run, "check": check}[chosen.command](chosen)


def measure(_):
    """Run the tests once and note the lines and the seconds of each."""
    import coverage

    MEASURED.mkdir(parents=True, exist_ok=True)
    for path in MEASURED.iterdir():
        path.unlink()
    chosen = [*TESTS, "-n", "2", "-m", "not spark and not soak"]
    named = environment(KILLS_LINES=str(MEASURED), KILLS_FAILED=str(MEASURED / "failed.json"))
    command = [sys.executable, "-m", "pytest", *OPTIONS, *chosen]
    status = subprocess.run(command, cwd=ROOT, env=os.environ | named, check=False).returncode
    data = coverage.CoverageData(basename=str(MEASURED / "all"))
    for path in MEASURED.glob("lines.*"):
        part = coverage.CoverageData(basename=str(path))
        part.read()
        data.update(part)
    numbers, lines = {}, {}
    for file in data.measured_files():
        of_file = lines[str(Path(file).relative_to(ROOT))] = {}
        for line, tests in data.contexts_by_lineno(file).items():
            of_file[line] = [numbers.setdefault(test, len(numbers)) for test in tests if test]
    seconds = {}
    for path in MEASURED.glob("seconds.*.json"):
        for test, each in json.loads(path.read_text()).items():
            seconds[test] = max(seconds.get(test, 0), each)
    failed = json.loads((MEASURED / "failed.json").read_text())
    (MEASURED / "measured.json").write_text(
        json.dumps({"tests": [*numbers], "lines": lines, "seconds": seconds, "failed": failed})
    )
    print(f"{len(seconds)} tests, {sum(seconds.values()):.0f} s, {len(lines)} modules")
    return status


def run(chosen):
    """Plant the mutants of the ledger that have not been tried yet."""
    ledger, places = load(), present()
    measured = json.loads((MEASURED / "measured.json").read_text())
    if not ledger["mutants"]:
        ledger["mutants"] = sample(places)
    tests = collected()
    for each in ledger["mutants"]:
        if each.get("killers") and not tests.intersection(each["killers"]):
            del each["killers"]
    is_wanted = (lambda each: each.get("killers") == []) if chosen.alive else (lambda each: "killers" not in each)
    waiting = [each for each in ledger["mutants"] if is_wanted(each) and each["key"] in places][: chosen.sample]
    seconds_max = 20 * SECONDS_MAX if chosen.alive else SECONDS_MAX
    until = time.monotonic() + 60 * chosen.minutes

    def tried(entry):
        if time.monotonic() > until:
            return entry, [], None
        tests = tests_of(measured, *places[entry["key"]], seconds_max=seconds_max)
        for some in (tests[:FIRST_COUNT], tests[FIRST_COUNT:]):
            failed = failing(entry, places, some, failed_max=KILLERS_MAX, seconds_max=seconds_max) if some else []
            if failed:
                break
        return entry, tests, failed

    done = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in as_completed([pool.submit(tried, entry) for entry in waiting]):
            entry, tests, failed = future.result()
            if failed is None:
                continue
            entry |= {"tried": len(tests), "killers": spread(failed)}
            done += 1
            print(f"{entry['module']} {entry['name']}: {entry['change']}: {len(failed)} of {len(tests)}", flush=True)
            if done % 20 == 0:
                save(ledger)
    save(ledger)
    tried_count = sum("killers" in each for each in ledger["mutants"])
    killed = sum(bool(each.get("killers")) for each in ledger["mutants"])
    print(f"{done} tried now; of {len(ledger['mutants'])} mutants {tried_count} are tried, {killed} of them killed")
    return 0


def check(chosen):
    """Run up to three killers of each killed mutant whose statement exists; report those that live."""
    ledger, places, tests = load(), present(), collected()
    killed = [each for each in ledger["mutants"] if each.get("killers") and each["key"] in places]
    if chosen.sample:
        killed = random.Random(time.time_ns()).sample(killed, min(chosen.sample, len(killed)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        left = [[test for test in each["killers"] if test in tests][:3] for each in killed]
        failed = pool.map(lambda each, tests: tests and failing(each, places, tests, failed_max=1), killed, left)
        alive = [each for each, tests in zip(killed, failed, strict=True) if not tests]
    for each in alive:
        print(f"alive: {each['module']} {each['name']}: {each['statement']!r}: {each['change']}")
    print(f"{len(killed) - len(alive)} of {len(killed)} are still killed")
    return len(alive) > 0


def collected():
    """Return the ids of the tests that exist."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment(), capture_output=True, text=True, check=True)
    tests = {line for line in done.stdout.splitlines() if "::" in line}
    return tests | {test.partition("::")[0] for test in tests}  # a mutant may keep a file from being read


def present():
    """Return where each mutant is now, by its key: its path and site."""
    return {
        site.mutant.key: (path.relative_to(ROOT), site)
        for path, site in find(ROOT)
        if is_mutated(str(path.relative_to(ROOT)))
    }


def is_mutated(path):
    """Tell whether a module's mutants belong in the ledger: of the analysis, only what computes its numbers."""
    rest = path.removeprefix(ANALYSIS)
    return rest == path or rest.startswith(("trace/", "replay/", "estimate/"))


def sample(places):
    """Return entries of mutants to try: of the library mostly, some of the analysis, in no order."""
    chosen = random.Random(19_966)
    of_analysis = {key for key in places if places[key][0].is_relative_to(ANALYSIS)}
    keys = chosen.sample(sorted(places.keys() - of_analysis), MUTANT_COUNT - ANALYSIS_COUNT)
    keys += chosen.sample(sorted(of_analysis), ANALYSIS_COUNT)
    chosen.shuffle(keys)
    return [{"key": key, "module": str(places[key][0]), **places[key][1].mutant._asdict()} for key in keys]


def tests_of(measured, path, site, *, seconds_max):
    """Return tests that execute a site, one of each function first, within a limit of seconds."""
    lines, seconds = measured["lines"].get(str(path), {}), measured["seconds"]
    numbers = {number for line in site.lines for number in lines.get(str(line), ())}
    tests = {measured["tests"][number] for number in numbers}.difference(measured["failed"])
    turns = defaultdict(int)
    ordered = []
    for test in sorted(tests, key=lambda each: (seconds.get(each, 0), each)):
        function = test.partition("[")[0]
        ordered.append((turns[function], seconds.get(test, 0), test))
        turns[function] += 1
    chosen, left = [], seconds_max
    for _, took, test in sorted(ordered):
        if left >= took or not chosen:
            chosen.append(test)
            left -= took + 0.01
    return chosen


def failing(entry, places, tests, *, failed_max, seconds_max=SECONDS_MAX):
    """Return the tests that fail on a mutant, at most so many, and the one that does not end."""
    path, site = places[entry["key"]]
    module = ".".join(path.with_suffix("").parts)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        named = environment(MUTANT=f"{module} {site.order}", KILLS_FAILED=file.name)
        chosen = [*OPTIONS, *tests, f"--maxfail={failed_max}"]
        status = forked.run(chosen, named, seconds_max=30 + 2 * seconds_max)
        text = file.read()
        return json.loads(text) if text else tests[:1] * (status != 0)


def spread(failed):
    """Return some killers, of different functions and modules first."""
    turns = defaultdict(int)
    ordered = []
    for test in failed:
        module = test.partition("::")[0]
        ordered.append((turns[module], test))
        turns[module] += 1
    return [test for _, test in sorted(ordered)[:KILLERS_MAX]]


def environment(**more):
    """Return the variables of a run of the tests."""
    paths = [str(Path(__file__).with_name("site")), str(ROOT), str(ROOT / "tests")]
    return {"PYTHONPATH": os.pathsep.join(paths), "HYPOTHESIS_PROFILE": "ci", **more}


def load():
    return json.loads(LEDGER.read_text(encoding="utf-8")) if LEDGER.exists() else {"mutants": []}


def save(ledger):
    lines = ",\n".join(json.dumps(each) for each in ledger["mutants"])
    unfinished = LEDGER.with_suffix(".new")
    unfinished.write_text(f'{{"mutants": [\n{lines}\n]}}\n', encoding="utf-8")
    unfinished.replace(LEDGER)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
