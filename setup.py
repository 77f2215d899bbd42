"""Adds the place of the sources to the metadata: links of the README and the project's URLs lead there.

The place is `ACKSTATE_SOURCE_URL`, as https://HOST/OWNER/NAME/blob/main, else the remote `origin` of the checkout; a
source distribution has it in its metadata. Without a place the README has labels instead of links, and no URLs.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def source_url() -> str:
    """Return where source files can be read, without a slash at its end; empty if nowhere."""
    if url := os.environ.get("ACKSTATE_SOURCE_URL"):
        return url.rstrip("/")
    metadata = ROOT / "PKG-INFO"
    if metadata.exists():
        found = re.search(r"^Project-URL: Source, (\S+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        return found[1] if found else ""
    ask = ["git", "-C", ROOT, "remote", "get-url", "origin"]
    try:
        origin = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603
    except OSError:
        return ""
    hosted = re.fullmatch(r"(?:https://(?:[^@/]+@)?|git@|ssh://git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", origin)
    return f"https://{hosted[1]}/{hosted[2]}/blob/main" if hosted else ""


def project_urls(source: str) -> dict[str, str]:
    """Return the URLs of the project by their labels."""
    if not source:
        return {}
    return {
        "Homepage": source.partition("/blob/")[0],
        "Documentation": f"{source}/docs/tutorial.md",
        "Changelog": f"{source}/CHANGELOG.md",
        "Source": source,
        "Issues": f"{source.partition('/blob/')[0]}/issues",
        "Security": f"{source}/SECURITY.md",
    }


def long_description(source: str) -> str:
    """Return the README with links to the sources, or with labels in place of links."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\[\]]+)\]\((?![a-z]+:)([^()]+)\)", rf"[\1]({source}/\2)" if source else r"\1", text)


SOURCE = source_url()
setup(
    long_description=long_description(SOURCE),
    long_description_content_type="text/markdown",
    project_urls=project_urls(SOURCE),
)
