"""A headless Chromium, and the questions that tests put to its pages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
MISSING = [path.name for path in (CHROMIUM, DRIVER) if not path.exists()]

# Fetched by `.ci/setup browser`.
AXE = Path(sys.prefix) / "share" / "ackstate" / "axe" / "axe.min.js"

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
)  # fmt: skip


class Rectangle(NamedTuple):
    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other):
        # Boxes reach a little beyond the ink.
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > 2 and down > 2


def chromium(profile):
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for option in (*_OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(executable_path=str(DRIVER)))


def emulate(browser, *, width, scheme, height=900):
    """Set the size in pixels and the colour scheme, and forget earlier log entries."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for log in ("browser", "performance"):
        browser.get_log(log)


def requests(browser):
    """The addresses that the page asked for, itself among them."""
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    return [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
        and not message["params"]["documentURL"].startswith("chrome:")
    ]


def luminance(colour):
    """Brightness of a colour that the browser writes as rgb(r, g, b), from 0 to 1."""
    red, green, blue = (int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def barriers(browser):
    """The violations that axe-core finds, each with the elements concerned; all of its rules apply."""
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    script = "const done = arguments[0]; axe.run().then((found) => done(found.violations))"
    found = browser.execute_async_script(script)
    return [(each["id"], [node["target"] for node in each["nodes"]]) for each in found]
