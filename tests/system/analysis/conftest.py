"""A browser for the tests that open a report."""

import pytest

from chromium import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    driver = chromium(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()
