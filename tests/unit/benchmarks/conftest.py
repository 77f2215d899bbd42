"""Benchmarks collect garbage before each measurement."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def without_the_objects_of_other_tests():
    """Exclude them from the collections, each of which would take a third of a second."""
    gc.freeze()
    yield
    gc.unfreeze()
