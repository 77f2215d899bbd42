"""Renders a page for people as one HTML file that needs no other file and no network."""

from __future__ import annotations

import html
from string import Template
from typing import TYPE_CHECKING

from ackstate.analysis.wording import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A table with more columns does not fit on a phone.
_NARROW_COLUMNS = 5

# The policy forbids every request, so the page cannot even try one. Paper is white.
_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; script-src $scripts; style-src 'unsafe-inline'; img-src data:; base-uri 'none';
  form-action 'none'">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #4d5761; --line: #d5dae0; --paper: #fff; --mark: #f3f5f7;
  --good: #1a7f37; --bad: #c5221f; --strong: #2f6fb0; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #a9b3bd; --line: #353d46; --paper: #14181d; --mark: #1d232a;
    --good: #4cc26a; --bad: #ff7b72; --strong: #79b8ff; }
}
@media print { :root { color-scheme: light; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 66rem; padding: 1rem; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.6rem; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p, figcaption { max-width: 46rem; color: var(--soft); overflow-wrap: anywhere; }
.lead { max-width: none; padding: .6rem .9rem; background: var(--mark); border-left: .35rem solid;
  font-weight: 600; color: var(--ink); }
.lead.holds { color: var(--good); }
.lead.fails { color: var(--bad); }
.lead.holds::before { content: "✓ "; }
.lead.fails::before { content: "✗ "; }
figure { margin: 1rem 0; }
figcaption { margin-top: .5rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { padding-left: 0; text-align: left; max-width: 20rem; overflow-wrap: break-word; }
thead th { border-bottom: 2px solid var(--soft); vertical-align: bottom; }
tr.fails td { font-weight: 700; }
@media (max-width: 40rem) {
  .wide thead { display: none; }
  .wide :is(table, tbody, tr) { display: block; }
  .wide tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .wide td { display: flex; justify-content: space-between; gap: 1rem; max-width: none; border: 0; padding: .1rem 0; }
  .wide td::before { content: attr(data-column); color: var(--soft); font-weight: 400; text-align: left; }
  .wide td:first-child { font-weight: 600; }
}
$style</style>
</head>
<body>
$body
</body>
</html>
""")


def escape(text: str) -> str:
    """Return untrusted text for a page: without markup, and with control characters shown."""
    return html.escape(printable(text))


def document(title: str, body: str, *, scripts: str, style: str = "") -> str:
    """Return a whole page."""
    return _PAGE.substitute(title=escape(title), body=body, scripts=scripts, style=style)


def section(title: str, identity: str, content: str, *, notes: Sequence[str] = ()) -> str:
    """Return a section; content that is too wide scrolls."""
    told = "".join(f"\n<p>{escape(note)}</p>" for note in notes)
    # A scrolling element must be reachable by keyboard.
    return (
        f'<section id="{identity}">\n<h2>{escape(title)}</h2>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">{content}</div>{told}\n</section>'
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, failing: Sequence[int] = ()) -> str:
    """Return a table; the rows whose index is in `failing` stand out.

    Each cell names its column, because on a narrow page the rows of a wide table become lists.
    """
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = []
    for index, row in enumerate(rows):
        cells = "".join(
            f'<td data-column="{escape(column)}">{escape(str(cell))}</td>'
            for column, cell in zip(header, row, strict=True)
        )
        tone = ' class="fails"' if index in failing else ""
        body.append(f"<tr{tone}>{cells}</tr>")
    shape = ' class="wide"' if len(header) > _NARROW_COLUMNS else ""
    return f"<div{shape}><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
