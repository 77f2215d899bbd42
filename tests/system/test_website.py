"""`make docs` builds a site without warnings that needs no network: its pages, its search, its links to sources."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import chromium

ROOT = Path(__file__).parents[2]
# Elements that a browser fetches; a link that a reader may follow is none.
FETCHED = re.compile(
    r"<(?:script|link|img|iframe|source|object|use|video|form)\b[^>]*?\b(?:src|href|data|srcset|action)=[\"']?"
    r"(?P<url>(?:https?:)?//[^\"' >]+)"
)
IN_STYLES = re.compile(r"(?:url\([\"']?|@import\s+[\"'])(?:https?:)?//")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.xdist_group("website"),
    # An environment that was not made by `make setup` may lack them.
    pytest.mark.usefixtures("packages"),
]


@pytest.fixture(scope="module")
def packages():
    pytest.importorskip("mkdocs", reason="needs the extra docs")


def build(site, *, root=ROOT, **environment):
    """Build the site; return the output of a failed build, and nothing of a successful one."""
    # Not --quiet: then MkDocs would not count warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", site]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "ACKSTATE_SOURCE_URL": "", **environment}
    built = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False)
    return built.stdout + built.stderr if built.returncode else ""


@pytest.fixture(scope="module")
def site(packages, tmp_path_factory):
    """The built site."""
    directory = tmp_path_factory.mktemp("site")
    assert build(directory) == ""
    return directory


def text_of(page):
    """Return the text of a page without its elements."""
    return unescape(re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8")))


def test_every_markdown_page_is_in_the_site(site):
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix().replace("README.html", "index.html")
        assert (site / name).exists(), name
    for name in ("index", "benchmarks", "examples", "project/changelog", "project/contributing", "project/security"):
        assert (site / f"{name}.html").exists(), name


def test_no_page_requests_another_host(site):
    pages = [*site.rglob("*.html")]
    assert len(pages) > 40
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert [match["url"] for match in FETCHED.finditer(text)] == [], page
        assert 'class="mermaid"' not in text, page  # the theme would load its program from another host
    for style in site.rglob("*.css"):
        assert not IN_STYLES.search(style.read_text(encoding="utf-8")), style


def test_every_picture_is_for_light_and_dark(site):
    pictures = [path for path in site.rglob("*.svg") if "assets" not in path.parts]
    assert len(pictures) > 8
    for picture in pictures:
        assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8"), picture


def test_the_generated_pages_name_every_command_setting_and_metric(site):
    from website import api, commands, metrics, settings
    from website.pulsar_keys import KEYS

    text = text_of(site / "reference" / "commands.html")
    for command in commands.commands():
        assert command.help_text in text, command.words
    text = text_of(site / "reference" / "settings.html")
    for name in [row.name for kind in settings.CLASSES for row in settings.settings(kind)]:
        assert re.search(rf"^{name}$", text, re.MULTILINE), name
    for key in KEYS:
        assert re.search(rf"^{key.name}$", text, re.MULTILINE), key.name
    text = text_of(site / "reference" / "metrics.html")
    for row in [row for exporter in metrics.exporters() for row in exporter.metrics()]:
        assert re.search(rf"^{row.name}$", text, re.MULTILINE), row.name
    for page in api.PAGES:
        text = (site / "reference" / "api" / f"{page.file}.html").read_text(encoding="utf-8")
        for name in [name for names in page.names.values() for name in names]:
            assert f'id="{name}"' in text, name


def test_links_to_sources_are_text_unless_they_can_be_read_somewhere(site, tmp_path):
    assert not re.search(r'href="[^"]*analysis/crash/subject\.py"', (site / "crash-testing.html").read_text())
    assert build(tmp_path, ACKSTATE_SOURCE_URL="https://example.org/blob/main") == ""
    linked = (tmp_path / "crash-testing.html").read_text(encoding="utf-8")
    assert 'href="https://example.org/blob/main/analysis/crash/subject.py"' in linked


def test_broken_links_fail_the_build_and_are_named(packages, tmp_path):
    copy = tmp_path / "copy"
    (copy / "docs").mkdir(parents=True)
    for each in ROOT.iterdir():
        if each.name not in {"docs", "out"}:
            (copy / each.name).symlink_to(each)
    for each in (ROOT / "docs").iterdir():
        (copy / "docs" / each.name).symlink_to(each)
    links = "missing.md", "glossary.md#no-such-term", "../cursor/missing.py"
    (copy / "docs" / "results.md").unlink()
    (copy / "docs" / "results.md").write_text("# Results\n\n" + "".join(f"[a link]({link})\n" for link in links))
    output = build(tmp_path / "site", root=copy)
    for link in links:
        assert f"'{link}'" in output, output
    assert "Aborted with" in output


@pytest.mark.browser
@pytest.mark.skipif(bool(chromium.MISSING), reason=f"needs {' and '.join(chromium.MISSING)}")
@pytest.mark.parametrize("scheme", ["file", "http"])
def test_search_works_in_pages_that_are_opened_as_files_or_served(site, tmp_path, scheme):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    with ExitStack() as served:
        root = site.as_uri() if scheme == "file" else served.enter_context(server_of(site))
        browser = chromium.chromium(tmp_path / "profile")
        served.callback(browser.quit)
        chromium.emulate(browser, width=1_300, scheme="dark")
        browser.get(f"{root}/guides/set-limits.html")
        browser.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys("maxUnPersistAckRecordsBytes")
        results = "a.md-search-result__link"
        WebDriverWait(browser, 60).until(lambda page: page.find_elements(By.CSS_SELECTOR, results))
        found = [each.get_attribute("href") for each in browser.find_elements(By.CSS_SELECTOR, results)]
        assert any("reference/settings.html" in each for each in found), found
        assert all(each.startswith(root) for each in found)
        paper = browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
        assert chromium.luminance(paper) < 0.3
        foreign = [url for url in chromium.requests(browser) if not url.startswith((root, "data:", "about:", "blob:"))]
        assert foreign == []


@contextmanager
def server_of(directory):
    """Serve a directory over HTTP while the block runs; yield its URL."""
    handler = partial(QuietHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass
