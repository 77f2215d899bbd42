"""Run the tests on the mutants: `python -m mutants [NAME...]`; the exit status is 1 if one survives.

Each mutant is planted in a copy of the files that git knows, so the work tree stays as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutants.listed import MUTANTS

ROOT = Path(__file__).parents[2]
LAYER_BUDGET = "60s"


def copy_tree(directory):
    """Copy the files in git, with the links in `ackstate/`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)


def killer_of(mutant, tree):
    """Return the check that notices a mutant, and None if none does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), str(tree / "tests")))}
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
    done = subprocess.run(pytest, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 1:
        return next(line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    assert done.returncode == 0, done.stdout + done.stderr
    if mutant.layer:
        crash = ["-P", "-m", "ackstate.analysis.cli", "crash", "--layer", mutant.layer, "--seed", "1"]
        command = [sys.executable, *crash, "--budget", LAYER_BUDGET]
        if subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False).returncode == 1:
            return f"layer {mutant.layer}"
    return None


def main(names):
    survived = []
    with tempfile.TemporaryDirectory(prefix="ackstate-mutants-") as directory:
        tree = Path(directory)
        copy_tree(tree)
        for mutant in MUTANTS:
            if names and mutant.name not in names:
                continue
            path = tree / mutant.file
            sound = path.read_text(encoding="utf-8")
            count = sound.count(mutant.old)
            assert count == 1, f"{mutant.name}: {mutant.file} must have the text once, has it {count} times"
            planted = sound.replace(mutant.old, mutant.new)
            # Otherwise the tests would fail for any text.
            compile(planted, mutant.file, "exec")
            path.write_text(planted, encoding="utf-8")
            begun = time.monotonic()
            killer = killer_of(mutant, tree)
            path.write_text(sound, encoding="utf-8")
            print(
                f"{mutant.name}: {killer or 'SURVIVED: ' + mutant.harm} ({time.monotonic() - begun:.0f} s)", flush=True
            )
            if killer is None:
                survived.append(mutant.name)
    print(f"{len(survived)} survived: {', '.join(survived)}" if survived else "all killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
