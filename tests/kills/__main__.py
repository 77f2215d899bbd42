"""The kill ledger: which test notices which change of the product. `python -m kills --help`.

`lines` runs the tests and notes the lines that each executes, into out/kills; `run` plants the ledger's mutants,
one at a time, in front of the tests that execute their lines, and notes which fail; it goes on where it stopped.
`check` expects a killer of each mutant that was killed, and whose statement still exists, to fail again. A mutant that
lives has a reason in the ledger. Killers that need servers, all below tests/system, are run by `make test` alone.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Listener
from pathlib import Path
from queue import SimpleQueue

from kills.mutants import find

ROOT = Path(__file__).resolve().parents[2]
LEDGER = Path(__file__).with_name("ledger.json")
MEASURED = ROOT / "out" / "kills"
ANALYSIS = "ackstate/analysis/"
MUTATED = ("replay/", "estimate/")  # of the analysis, what computes its numbers
TESTS = ("tests/unit", "tests/model", "tests/system/cursor/test_store_conformance.py")
PYTEST = (
    *(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--assert=plain",
        "--tb=no",
        "-m",
        "not spark and not soak and not browser",
    ),
    *("-p", "kills.worker", "-p", "no:cacheprovider", "-p", "no:faulthandler", *TESTS),
)
MUTANT_COUNT, SEED = 1_000, 44_001
KILLERS_MAX = 3
SECONDS_MAX = 10.0
"""Of the tests that are run on one mutant, as measured with their lines."""


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m kills", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lines")
    for name in ("run", "check"):
        command = commands.add_parser(name)
        command.add_argument("--sample", type=int, help="so many of the mutants, not all")
        if name == "run":
            command.add_argument("--minutes", type=float, default=60)
            command.add_argument("--alive", action="store_true", help="those that live, on all tests of their lines")
    chosen = parser.parse_args(arguments)
    return {"lines": measure, "run": run, "check": check}[chosen.command](chosen)


def measure(_):
    """Run the tests once and note the lines and the seconds of each."""
    import coverage

    MEASURED.mkdir(parents=True, exist_ok=True)
    for path in MEASURED.iterdir():
        path.unlink()
    status = subprocess.run([*PYTEST, "-n", "2"], cwd=ROOT, env=environment(KILLS_LINES=str(MEASURED)), check=False)
    data, seconds, failed = coverage.CoverageData(basename=str(MEASURED / "all")), {}, []
    for path in MEASURED.glob("lines.*"):
        part = coverage.CoverageData(basename=str(path))
        part.read()
        data.update(part)
    numbers, lines = {}, {}
    for file in data.measured_files():
        of_file = lines[str(Path(file).relative_to(ROOT))] = {}
        for line, tests in data.contexts_by_lineno(file).items():
            of_file[line] = [numbers.setdefault(test, len(numbers)) for test in tests if test]
    for path in MEASURED.glob("tests.*.json"):
        part = json.loads(path.read_text())
        seconds |= part[0]
        failed += part[1]
    measured = {"tests": [*numbers], "lines": lines, "seconds": seconds, "failed": failed}
    (MEASURED / "measured.json").write_text(json.dumps(measured))
    print(f"{len(seconds)} tests, {sum(seconds.values()):.0f} s, {len(lines)} modules")
    return status.returncode


def run(chosen):
    """Plant the mutants of the ledger that have not been tried yet."""
    ledger, places = load(), present()
    measured = json.loads((MEASURED / "measured.json").read_text())
    if not ledger["mutants"]:
        ledger["mutants"] = sample(places)
    seconds_max = 20 * SECONDS_MAX if chosen.alive else SECONDS_MAX
    until = time.monotonic() + 60 * chosen.minutes

    with workers() as (tests, failing):
        for each in ledger["mutants"]:
            if each.get("killers") and not tests.intersection(each["killers"]):
                del each["killers"]
        wanted = (lambda each: each.get("killers") == []) if chosen.alive else (lambda each: "killers" not in each)
        waiting = [each for each in ledger["mutants"] if wanted(each) and each["key"] in places][: chosen.sample]

        def tried(entry):
            if time.monotonic() < until:
                of_lines = [each for each in tests_of(measured, *places[entry["key"]], seconds_max) if each in tests]
                killers = failing(places[entry["key"]], of_lines, KILLERS_MAX, seconds_max)
                entry |= {"tried": len(of_lines), "killers": killers}
                print(f"{entry['module']} {entry['name']}: {entry['change']}: {len(killers)}", flush=True)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for number, _ in enumerate(pool.map(tried, waiting), 1):
                if number % 100 == 0:
                    save(ledger)
    save(ledger)
    tried_count = sum("killers" in each for each in ledger["mutants"])
    killed = sum(bool(each.get("killers")) for each in ledger["mutants"])
    print(f"of {len(ledger['mutants'])} mutants {tried_count} are tried, {killed} of them killed")
    return 0


def check(chosen):
    """Run the killers of each killed mutant whose statement exists; report those that live."""
    ledger, places = load(), present()
    killed = [
        each for each in ledger["mutants"]
        if each["key"] in places and any(test.startswith(TESTS) for test in each.get("killers", ()))
    ]  # fmt: skip
    if chosen.sample:
        killed = random.Random(time.time_ns()).sample(killed, min(chosen.sample, len(killed)))
    with workers() as (tests, failing), ThreadPoolExecutor(os.cpu_count()) as pool:
        left = [[test for test in each["killers"] if test in tests] for each in killed]
        failed = [*pool.map(lambda each, some: failing(places[each["key"]], some, 1, SECONDS_MAX), killed, left)]
    alive = [each for each, some in zip(killed, failed, strict=True) if not some]
    for each in alive:
        print(f"alive: {each['module']} {each['name']}: {each['statement']!r}: {each['change']}")
    print(f"{len(killed) - len(alive)} of {len(killed)} are still killed")
    return len(alive) > 0


@contextmanager
def workers():
    """Yield the names of the tests, and a function that returns those that fail on the mutant of a place.

    It takes the place, names of tests, how many failures are enough, and the seconds that the tests take without one.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/socket"
        variables = environment(KILLS_SOCKET=path)
        with Listener(path, family="AF_UNIX") as listener:
            started = [subprocess.Popen(PYTEST, cwd=ROOT, env=variables) for _ in range(os.cpu_count())]
            idle = SimpleQueue()
            connections = [listener.accept() for _ in started]
            for each in connections:
                tests = set(each.recv())
                idle.put(each)

            def failing(place, names, failed_max, seconds):
                worker, (file, site) = idle.get(), place
                worker.send((str(file), site.order, names, failed_max, int(30 + 2 * seconds)))
                try:
                    return worker.recv()
                finally:
                    idle.put(worker)

            try:
                yield tests, failing
            finally:
                for each in connections:
                    each.send(None)
                for each in started:
                    with suppress(subprocess.TimeoutExpired):
                        each.wait(60)
                    each.kill()
                    each.wait()


def present():
    """Return where each mutant is now, by its key: its path and site."""
    return {
        site.mutant.key: (path.relative_to(ROOT), site)
        for path, site in find(ROOT)
        if is_mutated(str(path.relative_to(ROOT)))
    }


def is_mutated(path):
    """Tell whether a module's mutants belong in the ledger."""
    rest = path.removeprefix(ANALYSIS)
    return rest == path or rest.startswith(MUTATED)


def sample(places):
    """Return entries of mutants to try, in no order."""
    keys = random.Random(SEED).sample(sorted(places), MUTANT_COUNT)
    return [{"key": key, "module": str(places[key][0]), **places[key][1].mutant._asdict()} for key in keys]


def tests_of(measured, path, site, seconds_max):
    """Return tests that execute a site, one of each function first, within a limit of seconds."""
    lines, seconds = measured["lines"].get(str(path), {}), measured["seconds"]
    numbers = {number for line in site.lines for number in lines.get(str(line), ())}
    tests = {measured["tests"][number] for number in numbers}.difference(measured["failed"])
    turns, ordered = defaultdict(int), []
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


def environment(**more):
    """Return the variables of a run of the tests."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return os.environ | {"PYTHONPATH": paths, "HYPOTHESIS_PROFILE": "ci", **more}


def load():
    return json.loads(LEDGER.read_text(encoding="utf-8")) if LEDGER.exists() else {"mutants": []}


def save(ledger):
    lines = ",\n".join(json.dumps(each) for each in ledger["mutants"])
    unfinished = LEDGER.with_suffix(".new")
    unfinished.write_text(f'{{"mutants": [\n{lines}\n]}}\n', encoding="utf-8")
    unfinished.replace(LEDGER)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
