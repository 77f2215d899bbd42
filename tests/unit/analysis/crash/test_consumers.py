"""Seeded workloads of one subscription."""

from random import Random

import pytest

from ackstate.analysis.crash import runs as consumers
from ackstate.analysis.crash.subject import OperationKind
from ackstate.analysis.workloads.traffic import WORKLOADS


@pytest.mark.parametrize("shape", WORKLOADS.values(), ids=WORKLOADS)
def test_steps_are_decided_by_the_seed_and_of_any_length(shape):
    log = consumers.ledgers(Random(4))
    found = [consumers.operations(Random(7), log, length=length, shape=shape) for length in (0, 50, 500)]
    assert [len(each) for each in found] == [0, 50, 500]
    assert found[2][:50] == found[1]
    for step in found[2]:
        if step.kind is not OperationKind.PERSIST:
            assert step.entry_id < log[step.ledger_id]


def test_no_mark_delete_is_one_that_a_cursor_refuses():
    """Below it everything is acked already, so none goes back, also after a recovery."""
    seen = 0
    for seed in range(40):
        log = consumers.ledgers(Random(seed))
        known = [(ledger_id, 0, count // 2) for ledger_id, count in log.items()]
        acked = {(ledger_id, entry_id) for ledger_id, first, end in known for entry_id in range(first, end)}
        every = [(ledger_id, entry_id) for ledger_id, count in log.items() for entry_id in range(count)]
        for step in consumers.operations(Random(seed), log, length=150, known=known):
            if step.kind is OperationKind.ACK:
                acked.add(step[2:])
            elif step.kind is OperationKind.MARK_DELETE:
                seen += 1
                first_unacked = next((each for each in every if each not in acked), every[-1])
                assert step[2:] >= first_unacked
                acked.update(each for each in every if each <= step[2:])
    assert seen > 100
