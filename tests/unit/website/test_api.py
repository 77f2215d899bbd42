"""The reference documents every public name once."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import pytest

from website import api

DOCUMENTED = Counter(name for page in api.PAGES for names in page.names.values() for name in names)
NOT_IN_A_PACKAGE = {
    "ackstate.stores.bookkeeper.BookKeeperStore",  # needs the extra `bookkeeper`
}
MODULES = (
    "ackstate.cursor",
    "ackstate.dispatch",
    "ackstate.stores",
    "ackstate.topic",
    "ackstate.aio",
    "ackstate.testing",
    "ackstate.delay",
    "ackstate.limits",
)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module):
    assert {f"{module}.{name}" for name in import_module(module).__all__} <= set(DOCUMENTED)


def test_the_table_has_the_names_of_all_packages_and_they_are_few():
    table = {module: set(names.split()) for module, names in api.PUBLIC.items()}
    assert table == {module: set(import_module(module).__all__) for module in ("ackstate", *MODULES)}
    assert sum(map(len, table.values())) <= 70


def test_every_name_of_the_top_is_documented():
    documented = {name.rpartition(".")[2] for name in DOCUMENTED}
    assert set(import_module("ackstate").__all__) <= documented


def test_every_class_of_a_crash_subject_is_documented():
    module = "ackstate.analysis.crash.subject"
    classes = {name for name, each in vars(import_module(module)).items() if getattr(each, "__module__", "") == module}
    assert {f"{module}.{name}" for name in classes} == {name for name in DOCUMENTED if name.startswith(module)}


def test_every_name_exists_and_is_on_one_page():
    for name, count in DOCUMENTED.items():
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name
        assert count == 1, name
        assert (
            module
            in {
                "ackstate",
                *MODULES,
                "ackstate.analysis.crash.subject",
                "ackstate.selection",
                "ackstate.delivery_ruler",
            }
            or name in NOT_IN_A_PACKAGE
        )


def test_every_page_is_in_the_navigation():
    assert {path for entry in api.navigation() for path in entry.values()} == set(api.pages())
