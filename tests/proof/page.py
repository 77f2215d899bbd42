"""Renders the result of a proof as docs/proof.md.

A part is *complete*, was run *in part*, was *not run*, or has *failed*.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ackstate.analysis.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HEAD = """\
# Status

`make proof` writes this page. It crashes our cursor in [every layer](crash-testing.md), runs the models, plants
[historical bugs](kill-matrix.md), compares kills with [the estimate](calibration.md), kills live brokers, and fuzzes
every decoder of foreign bytes. `BUDGET=2h` chooses the time; each part has a share of it.

**{verdict}** The proof began on {begun} with a budget of {budget_s:,} s, on {machine}.

| part | time | tried | failures | result |
|---|--:|---|--:|---|
"""
_COMPLETE, _PARTLY, _NOT_RUN, _FAILED = "complete", "run in part", "not run", "failed"
_NOT_BEGUN = {"seconds": 0, "tried": {}, "failures": [], "not_run": "the proof ended before"}


def render(status: Mapping[str, Any]) -> str:
    """Return the page of a status, as `proof.__main__` writes it."""
    done = {part["title"]: part for part in status["parts"]}
    parts = [done.get(title, {**_NOT_BEGUN, "title": title}) for title in status["planned"]]
    results = [_result(part) for part in parts]
    failures = sum(len(part["failures"]) for part in parts)
    counts = {result: results.count(result) for result in (_PARTLY, _NOT_RUN, _FAILED) if result in results}
    verdict = f"{counted(failures, 'failure')}." if failures else "Nothing failed."
    verdict += f" {results.count(_COMPLETE)} of {len(parts)} parts complete"
    verdict += "".join(f", {count} {result}" for result, count in counts.items()) + "."
    text = _HEAD.format(verdict=verdict, **{key: status[key] for key in ("begun", "budget_s", "machine")})
    return text + "\n".join(map(_row, parts)) + "\n" + "".join(_details(parts))


def _result(part: Mapping[str, Any]) -> str:
    if part["failures"]:
        return _FAILED
    if not part["tried"]:
        return _NOT_RUN
    return _PARTLY if part["not_run"] else _COMPLETE


def _row(part: Mapping[str, Any]) -> str:
    tried = "; ".join(f"{count:,} {what}" for what, count in part["tried"].items()) or "nothing"
    return f"| {part['title']} | {part['seconds']:,} s | {tried} | {len(part['failures']):,} | {_result(part)} |"


def _details(parts: list[Mapping[str, Any]]) -> Iterator[str]:
    limits = [f"- {part['title']}: {_plain(part['not_run'])}" for part in parts if part["not_run"]]
    failures = [f"- {part['title']}: {_plain(each)}" for part in parts for each in part["failures"]]
    if limits:
        yield "\n## Not run, or not completely\n\n" + "\n".join(limits) + "\n"
    if failures:
        yield "\n## Failures\n\n" + "\n".join(failures) + "\n"


def _plain(text: str) -> str:
    """Return a text that Markdown shows as it is, in one line."""
    return " ".join(text.split()).replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
