"""Hooks of MkDocs: pages from outside of docs/, pages that the code has, and links between files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

from website import reference
from website.repository import DOCS, PAGES, Repository

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parents[1]
_GENERATED = {
    "reference/api.md": reference.api_page,
    "reference/commands.md": reference.commands_page,
    "reference/settings.md": reference.settings_page,
    "reference/metrics.md": reference.metrics_page,
}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for path, site_path in PAGES.items():
        files.append(File.generated(config, site_path, abs_src_path=str(_ROOT / path)))
    for site_path, page in _GENERATED.items():
        files.append(File.generated(config, site_path, content=page()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Adapt the links of a page."""
    outside = {to: path for path, to in PAGES.items()}
    site_path = page.file.src_uri
    if site_path in _GENERATED:
        return markdown
    repository = Repository(_ROOT, str(config.extra.get("source_url") or "").rstrip("/"))
    return repository.adapt(markdown, path=outside.get(site_path, DOCS + site_path))
