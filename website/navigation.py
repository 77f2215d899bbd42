"""Completes the navigation of the site: sections with generated pages, and pages that it does not list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

GUIDES = "Guides"


def completed(nav: Sequence[Any], *, pages: Sequence[str], sections: Mapping[str, Sequence[Mapping[str, str]]]) -> Any:
    """Return a navigation that lists every page once.

    Args:
        nav: The navigation of `mkdocs.yml`.
        pages: All Markdown pages of the site. Those that the navigation does not list are added to the guides, by name.
        sections: Entries of a section, by the placeholder in its place.

    Raises:
        ValueError: There is no section for guides.
    """
    filled = _filled(nav, sections)
    listed = set(_listed(filled))
    added = [page for page in sorted(pages) if page not in listed]
    for entry in filled:
        if isinstance(entry, dict) and GUIDES in entry:
            return [{GUIDES: [*each[GUIDES], *added]} if each is entry else each for each in filled]
    raise ValueError(f"the navigation must have a section {GUIDES!r}")


def _filled(entry: Any, sections: Mapping[str, Sequence[Mapping[str, str]]]) -> Any:
    if isinstance(entry, list):
        return [_filled(each, sections) for each in entry]
    if isinstance(entry, dict):
        return {title: _filled(each, sections) for title, each in entry.items()}
    return list(sections[entry]) if entry in sections else entry


def _listed(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
        return
    for each in entry.values() if isinstance(entry, dict) else entry:
        yield from _listed(each)
