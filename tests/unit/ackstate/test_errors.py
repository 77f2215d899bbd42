"""Errors cross the borders of processes and reach several callers: each can be copied and pickled."""

import copy
import pickle

import pytest

from ackstate.errors import AckStateError, CorruptStateError, CursorFencedError

EXAMPLES = [
    AckStateError("the store is closed"),
    CorruptStateError("native record", offset=3, expected="a magic", found=b"\0"),
    CursorFencedError("another owner"),
]


@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_a_copy_says_the_same(error, duplicate):
    found = duplicate(error)
    assert found is not error
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))
