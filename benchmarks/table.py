"""Writes the tables of README.md from results/*.json: ``python -m benchmarks.table``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_BEGIN = "<!-- tables: written by python -m benchmarks.table -->"
_END = "<!-- end of tables -->"
COLUMNS = ("what", "unit", "median", "min", "max", "runs", "against", "ratio")
TEXT_COLUMNS = ("what", "unit")


def cells(figure: dict[str, Any]) -> list[str]:
    """Return one row as text."""
    spread, against = figure["spread"], figure["against"]
    numbers = [number(spread[part]) for part in ("median", "low", "high")]
    return [figure["what"], figure["unit"], *numbers, str(figure["runs"]), *_held_against(spread["median"], against)]


def _held_against(median: float, against: dict[str, Any] | None) -> tuple[str, str]:
    if against is None:
        return "", ""
    low, high = against["figure"], against["high"]
    if high is None:
        return f"{against['name']} {number(low)}", number(median / low)
    return f"{against['name']} {number(low)} to {number(high)}", f"{number(median / high)} to {number(median / low)}"


def number(figure: float) -> str:
    """Return three digits, or all of a whole number."""
    if figure >= 100 or figure == int(figure):
        return f"{figure:,.0f}"
    return f"{figure:.3g}"


def filled(page: str) -> str:
    """Return README.md with the tables of all results between its two marks."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    parts = [_section(path) for path in sorted((_HERE / "results").glob("*.json"))]
    return before + _BEGIN + "\n\n" + "".join(parts) + _END + after


def rewrite() -> None:
    """Put the tables of all results into README.md."""
    readme = _HERE / "README.md"
    readme.write_text(filled(readme.read_text()))


def _section(path: Path) -> str:
    written = json.loads(path.read_text())
    environment = written["environment"]
    libraries = ", ".join(f"{name} {number}" for name, number in environment["libraries"].items())
    lines = [f"### {path.stem}", "", written["about"], ""]
    lines.append("| " + " | ".join(COLUMNS) + " |")
    lines.append("|" + "|".join("---" if column in TEXT_COLUMNS else "--:" for column in COLUMNS) + "|")
    lines += ["| " + " | ".join(cells(figure)) + " |" for figure in written["figures"]]
    lines += ["", f"Python {environment['python']}, {environment['cores']} cores; {libraries}.", "", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    rewrite()
