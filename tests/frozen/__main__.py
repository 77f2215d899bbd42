"""Freeze this tree's answers, or compare them: `PYTHONPATH=.:tests .venv/bin/python -P -m frozen make|check [PART...]`.

A step that removes or rewrites code is right if all of this is still equal, or if its commit says why not. Never edit
an answer by hand. `verdicts` needs root, `traces` a Java in `JAVA_HOME`. `capabilities.tsv` names each promise, the
page that made it, and the tests that show it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from frozen.command import HERE
from frozen.parts import PARTS, kill_matrix_run

ANSWERS = HERE / "answers"
SHOWN_MAX = 12


def text_of(answer):
    """Return an answer as its file holds it: a line for what contains nothing more, the rest indented."""
    if isinstance(answer, list):
        return "".join(f"{line}\n" for line in answer)
    return f"{_json(answer, '')}\n"


def _json(value, indent):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(each, dict | list) for each in inner):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        parts, ends = [f"{json.dumps(key)}: {_json(each, indent + ' ')}" for key, each in value.items()], "{}"
    else:
        parts, ends = [_json(each, indent + " ") for each in value], "[]"
    return ends[0] + ",".join(f"\n{indent} {part}" for part in parts) + f"\n{indent}{ends[1]}"


def differences(expected, got, path=""):
    """Yield a line for each place in which two answers differ."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in [*expected, *(key for key in got if key not in expected)]:
            yield from differences(expected.get(key, "nothing"), got.get(key, "nothing"), f"{path}/{key}")
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        for number, pair in enumerate(zip(expected, got, strict=True)):
            yield from differences(*pair, f"{path}/{_name_of(pair[0], number)}")
    elif isinstance(expected, list) and isinstance(got, list) and path == "":
        yield from (f"missing: {line}" for line in expected if line not in got)
        yield from (f"more: {line}" for line in got if line not in expected)
    elif type(expected) is not type(got) or expected != got:
        yield f"{path}: expected {_short(expected)}, got {_short(got)}"


def _name_of(member, number):
    """Return how a member of a list is called: a policy by its label, an estimate by whose it is."""
    if not isinstance(member, dict):
        return str(number)
    owner = " ".join(filter(None, (member.get("scope"), member.get("topic"), member.get("subscription"))))
    return member.get("label") or owner or str(number)


def _short(value):
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 160 else f"{text[:160]}..."


def check(part, name):
    """Compare one part with its files, and say how it went; return whether it is equal."""
    begun, count, files, wrong = time.monotonic(), 0, set(), []
    for file, *answers in part():
        path = ANSWERS / file
        files.add(path)
        text = path.read_text(encoding="utf-8") if path.exists() else "{}"
        expected = json.loads(text) if path.suffix == ".json" else text.splitlines()
        for engine, answer in zip(("", " (Spark)"), answers, strict=True):
            if answer is not None:
                count += 1
                wrong += [f"  {file}{engine}: {line}" for line in differences(expected, answer)]
    wrong += [f"  {path.name}: nothing makes it any more" for path in set((ANSWERS / name).glob("*")) - files]
    told = f"{len(wrong)} differences" if wrong else f"equal, {count} answers"
    print(f"{name}: {told}, {time.monotonic() - begun:.0f} s", flush=True)
    for line in wrong[:SHOWN_MAX]:
        print(line)
    if len(wrong) > SHOWN_MAX:
        print(f"  and {len(wrong) - SHOWN_MAX} more; all of them: python -m frozen make {name}, then git diff")
    return not wrong


def make(part, name):
    """Write the files of one part, and refuse one that Spark answers otherwise."""
    for file, answer, of_spark in part():
        lines = [] if of_spark is None else list(differences(answer, of_spark))
        if lines:
            sys.exit(f"{file}: Spark differs from the local engine: {lines[0]}")
        (ANSWERS / file).parent.mkdir(parents=True, exist_ok=True)
        (ANSWERS / file).write_text(text_of(answer), encoding="utf-8")
    print(f"{name}: made", flush=True)
    return True


def main():
    parser = argparse.ArgumentParser(prog="frozen", description=__doc__)
    parser.add_argument("action", choices=["make", "check"])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--run", action="store_true", help="run the museum again for kill_matrix")
    options = parser.parse_args()
    parts = PARTS | ({"kill_matrix": kill_matrix_run} if options.run else {})
    act = make if options.action == "make" else check
    outcomes = [act(parts[name], name) for name in options.parts or PARTS]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
