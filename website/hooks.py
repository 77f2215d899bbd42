"""Hooks of MkDocs: pages from outside of docs/, the help of all commands, and links between files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

from website import commands
from website.repository import DOCS, PAGES, Repository

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parents[1]
_COMMANDS = "reference/commands.md"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for path, site_path in PAGES.items():
        files.append(File.generated(config, site_path, abs_src_path=str(_ROOT / path)))
    files.append(File.generated(config, _COMMANDS, content=commands.page()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Adapt the links of a page."""
    outside = {to: path for path, to in PAGES.items()}
    site_path = page.file.src_uri
    if site_path == _COMMANDS:
        return markdown
    repository = Repository(_ROOT, str(config.extra.get("source_url") or "").rstrip("/"))
    return repository.adapt(markdown, path=outside.get(site_path, DOCS + site_path))
