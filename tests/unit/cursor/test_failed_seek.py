"""A seek whose write failed: the disk holds the cursor as it was or restarted, and each report is true of either."""

import pytest

from ackstate import Format
from cursors import StoryCursor

FORMATS = pytest.mark.parametrize("form", Format)


@FORMATS
def test_of_two_that_failed_the_one_counts_that_leaves_more_bytes(form):
    """That is the upper one here: the begin of a range takes a byte more, and the limit is one of bytes."""
    StoryCursor({3: 300}, format=form).tell(
        "entries 11..200; persist; at 1; fault FAIL_BEFORE 6; reset 10 ! StoreError; works; unpersisted -> 15; "
        "fault FAIL_AFTER 6; reset 150 ! StoreError; works; unpersisted -> 16; gauge -> 190; crash; backlog -> 150"
    )


@FORMATS
@pytest.mark.parametrize("outcome", ["FAIL_BEFORE", "FAIL_AFTER", "SYNC_FAILED"])
def test_nor_does_a_receipt_count_after_a_persist_that_fails_too(form, outcome):
    StoryCursor({3: 10, 5: 10}, format=form).tell(
        "upto 4; persist; at 1; fault FAIL_AFTER 6; reset 2 ! StoreError; works; broken; "
        f"fault {outcome}; at 2; persist ! StoreError; durable -> -; gauge -> 3"
    )
