"""Hooks of MkDocs: add the generated pages and those outside of docs/, and adapt their links."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

from website import api, commands, metrics, settings
from website.repository import DOCS, PAGES, Repository

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parents[1]
_API = "reference/api/"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the API into the navigation."""
    config.nav = _filled(config.nav)
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for path, site_path in PAGES.items():
        files.append(File.generated(config, site_path, abs_src_path=str(_ROOT / path)))
    for site_path, text in _generated().items():
        files.append(File.generated(config, site_path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Adapt the links of a page that is a file of the repository."""
    site_path = page.file.src_uri
    if site_path in _generated():
        return markdown
    outside = {to: path for path, to in PAGES.items()}
    return _repository(config).adapt(markdown, path=outside.get(site_path, DOCS + site_path))


def _filled(entry: Any) -> Any:
    if isinstance(entry, list):
        return [_filled(each) for each in entry]
    if isinstance(entry, dict):
        return {title: _filled(each) for title, each in entry.items()}
    return api.navigation() if entry == _API else entry


def _repository(config: MkDocsConfig) -> Repository:
    return Repository(_ROOT, str(config.extra.get("source_url") or "").rstrip("/"))


@cache
def _generated() -> dict[str, str]:
    return {
        **api.pages(),
        "reference/commands.md": commands.page(),
        "reference/settings.md": settings.page(),
        "reference/metrics.md": metrics.page(),
    }
