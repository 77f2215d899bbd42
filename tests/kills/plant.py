"""Plant the bugs of planted.json one at a time: `python -m kills.plant [NAME...]`; 1 if a killer misses its bug.

Each is planted in a copy of the files that git knows, so the work tree stays as it is. First the killers must pass.

A bug has a name, a file, an `old` text that occurs once in it, the `new` text instead, the harm that this does, and its
killers: ids of tests, and layers as ``layer L0``, each of which notices it; none if nothing does.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
PLANTED = [
    SimpleNamespace(**row) for row in json.loads(Path(__file__).with_name("planted.json").read_text(encoding="utf-8"))
]
CRASH = ("-P", "-m", "crash", "--seed", "1", "--budget", "60s", "--layer")


def copy_tree(tree):
    """Copy the files in git, with the links in `ackstate/`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)


def failing(tree, killers):
    """Return those of some killers, ids of tests and crash layers, that fail in a tree."""
    paths = os.pathsep.join((str(tree), str(tree / "tests")))
    environment = os.environ | {"PYTHONPATH": paths, "HYPOTHESIS_PROFILE": "ci"}

    def run(*command):
        command = [sys.executable, *command]
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)

    layers = {each for each in killers if each.startswith("layer ")}
    failed = {each for each in layers if run(*CRASH, each.removeprefix("layer ")).returncode == 1}
    if tests := [each for each in killers if each not in layers]:
        done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
        assert done.returncode in {0, 1}, done.stdout + done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        failed |= {line[1].partition("[")[0] for line in lines}
    return failed


def main(names):
    bugs = [bug for bug in PLANTED if not names or bug.name in names]
    is_missed = False
    with tempfile.TemporaryDirectory(prefix="ackstate-planted-") as directory:
        tree = Path(directory)
        copy_tree(tree)
        tests = {each for bug in bugs for each in bug.killers if not each.startswith("layer ")}
        assert not (failed := failing(tree, tests)), f"without a bug these fail: {failed}"
        for bug in bugs:
            path = tree / bug.file
            sound = path.read_text(encoding="utf-8")
            assert sound.count(bug.old) == 1, f"{bug.name}: {bug.file} must have the text once: {bug.old}"
            planted = sound.replace(bug.old, bug.new)
            compile(planted, bug.file, "exec")  # Otherwise the tests would fail for any text.
            path.write_text(planted, encoding="utf-8")
            missed = set(bug.killers) - failing(tree, bug.killers)
            path.write_text(sound, encoding="utf-8")
            is_missed |= bool(missed)
            result = f"MISSED by {missed}: {bug.harm}" if missed else "killed" if bug.killers else "alive, as is known"
            print(f"{bug.name}: {result}", flush=True)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
