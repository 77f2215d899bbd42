"""Adapts links of Markdown files, which lead to files of the repository, to the pages of the site."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Files outside of docs/ that are pages of the site: path in the repository -> path in the site."""
GENERATED = {
    "ackstate/__init__.py": "reference/api.md",
    "ackstate/metrics.py": "reference/metrics.md",
    "ackstate/pulsar_conf.py": "reference/settings.md",
}
"""Files whose content is a page of the site, too: a link to one leads to the page."""
DOCS = "docs/"

_FENCE = re.compile(r"^ *(```+)[^`]*$")
_LINK = re.compile(r"(?P<bang>!?)\[(?P<label>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)\)")
_SCHEME = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|#|/)", re.IGNORECASE)


class Repository(NamedTuple):
    """The checkout that a site is built from.

    Attributes:
        root: The directory with `docs/`.
        source_url: Where source files can be read, without a slash at its end; empty if nowhere.
    """

    root: Path
    source_url: str = ""

    def site_path(self, path: str) -> str | None:
        """Return the path in the site of a file of the repository, None for a file that is not in the site.

        Args:
            path: Relative to the root, normalized, with slashes.
        """
        if path in PAGES or path in GENERATED:
            return (PAGES | GENERATED)[path]
        if (self.root / path).is_dir() and (self.root / path / "README.md").exists():
            return self.site_path(f"{path}/README.md")
        if path.startswith(DOCS) and (self.root / path).is_file():
            return path.removeprefix(DOCS)
        return None

    def adapt(self, markdown: str, *, path: str) -> str:
        """Return a page with links that work in the site.

        A link to a file that is in the site leads there. A link to another existing file leads to `source_url`; without
        one, it becomes its label. A link to a missing file stays, and the strict build refuses it.

        Args:
            markdown: The text of the page.
            path: The file of the page, relative to the root, with slashes.
        """
        here = self.site_path(path)
        if here is None:
            raise ValueError(f"{path} is no page of the site")

        def adapted(link: re.Match[str]) -> str:
            return self._adapted(link, folder=posixpath.dirname(path), site_folder=posixpath.dirname(here))

        return "".join(part if is_code else _LINK.sub(adapted, part) for part, is_code in _parts(markdown))

    def _adapted(self, link: re.Match[str], *, folder: str, site_folder: str) -> str:
        target, hash_, anchor = link["target"].partition("#")
        if _SCHEME.match(link["target"]) or not target:
            return link[0]
        found = posixpath.normpath(posixpath.join(folder, target))
        site_path = self.site_path(found)
        if site_path is not None:
            target = posixpath.relpath(site_path, site_folder or ".")
            return f"{link['bang']}[{link['label']}]({target}{hash_}{anchor})"
        if found.startswith("..") or not (self.root / found).exists():
            return link[0]
        if self.source_url:
            return f"{link['bang']}[{link['label']}]({self.source_url}/{found}{hash_}{anchor})"
        return link["label"]


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """Split a text into pieces outside and inside of fenced code; the flag is true inside."""
    piece: list[str] = []
    fence = ""
    for line in markdown.splitlines(keepends=True):
        found = _FENCE.match(line.rstrip("\n"))
        if found and not fence:
            yield "".join(piece), False
            piece, fence = [line], found[1]
        elif found and line.strip() == fence:
            yield "".join([*piece, line]), True
            piece, fence = [], ""
        else:
            piece.append(line)
    yield "".join(piece), bool(fence)
