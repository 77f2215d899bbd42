"""Fills the figures of the pages from committed results: ``python -m benchmarks.figures``.

A figure stands between two comments, the first of which names it:

    <!--= scale :: as recorded, 10,000,000 events :: s :: .1f -->1.4<!--/-->

These are the file in `results/`, the text and the unit of its row, and the format: that of Python, with `,` for groups
of three, `2` for two significant digits, and factors such as `*1000` or `*24 /3600` before it to change the unit or to
extrapolate. `against` after the format takes the figure compared with, `ratio` the row divided by it, and `inverse` the
opposite.
Of a JSON file that is no benchmark, the second part is the path of a number: `totals.kills`. (A `|` between the parts
would end the cell of a table.)
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
_HERE = Path(__file__).parent
_FIGURE = re.compile(r"<!--= (?P<name>[^>]*?) -->(?P<text>[^<]*)<!--/-->")
_FORM = re.compile(r"(?P<factors>(?:[*/]\d+ )*)(?P<form>\S+)(?: (?P<side>against|ratio|inverse))?")


def filled(page: str) -> str:
    """Return a page with its figures from the results.

    Raises:
        ValueError: A figure has no result, or its comment is malformed.
    """
    if page.count("<!--= ") != len(_FIGURE.findall(page)):
        raise ValueError("a figure is not closed by <!--/-->")
    return _FIGURE.sub(lambda found: f"<!--= {found['name']} -->{figure(found['name'])}<!--/-->", page)


def figure(name: str) -> str:
    """Return the text of a figure by the name in its comment."""
    parts = [part.strip() for part in name.split("::")]
    if len(parts) == 4:
        file, what, unit, form = parts
        return _formatted(name, form, *_measured(file, what, unit))
    if len(parts) == 3:
        file, path, form = parts
        return _formatted(name, form, float(_at(file, path)), 0)
    raise ValueError(f"a figure must be FILE :: ROW :: UNIT :: FORMAT or FILE :: PATH :: FORMAT, got {name!r}")


@cache
def _read(file: str) -> Any:
    places = [_HERE / "results" / f"{file}.json", _HERE / f"{file}.json", ROOT / f"{file}.json"]
    for place in places:
        if place.exists():
            return json.loads(place.read_text(encoding="utf-8"))
    raise ValueError(f"there is no result {file!r}")


def _measured(file: str, what: str, unit: str) -> tuple[float, float]:
    """Return the median of a row, and the figure that it is compared with; 0 without one."""
    found = [row for row in _read(file)["figures"] if (row["what"], row["unit"]) == (what, unit)]
    if len(found) != 1:
        raise ValueError(f"{file} has {len(found)} rows {what!r} in {unit!r}")
    against = found[0]["against"]
    return found[0]["spread"]["median"], against["figure"] if against else 0


def _at(file: str, path: str) -> Any:
    value = _read(file)
    for part in path.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ValueError(f"{file} has no {path!r}") from None
    return value


def _formatted(name: str, form: str, number: float, against: float) -> str:
    found = _FORM.fullmatch(form)
    if not found:
        raise ValueError(f"the format of {name!r} is malformed")
    side = found["side"]
    if side:
        if not against:
            raise ValueError(f"{name!r} is compared with nothing")
        number = {"against": against, "ratio": number / against, "inverse": against / number}[side]
    for factor in found["factors"].split():
        number = number / float(factor[1:]) if factor[0] == "/" else number * float(factor[1:])
    if found["form"].isdigit():
        digits = found["form"]
        return f"{float(f'{number:.{digits}g}'):,.15g}"
    return format(number, found["form"])


def main() -> int:
    """Rewrite the pages; return 1 if a figure has no result."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        try:
            after = filled(before)
        except ValueError as error:
            print(f"{page.relative_to(ROOT)}: {error}", file=sys.stderr)
            return 1
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(page.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
