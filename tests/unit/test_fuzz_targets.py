"""Every fuzz target decodes its seeds and the kept corpus; `python -P -m fuzz` looks for new inputs."""

from __future__ import annotations

import pytest

from fuzz import corpus
from fuzz.targets import TARGETS, run

SLOW = {"json-lines", "ack-log", "sqlite-store", "parquet-trace"}
"""An input of these takes milliseconds: few of them are tried."""


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_kept_inputs_are_decoded_or_refused(name):
    target = TARGETS[name]
    seeds = target.seeds()
    assert seeds
    inputs = [*seeds, *corpus.kept(name)]
    accepted = [run(target, data) for data in (inputs[:: max(1, len(inputs) // 5)] if name in SLOW else inputs)]
    assert any(accepted) or name == "state-manifest"  # Its Parquet files are not there.


def test_an_error_that_a_target_may_not_raise_is_a_failure():
    broken = TARGETS["message"]._replace(decode=lambda data: data[9])
    with pytest.raises(IndexError):
        run(broken, b"short")
