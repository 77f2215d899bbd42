"""The example of a broker with its own storage runs, and continues where it ended."""

import re

from examples.own_storage import MESSAGES, main


def test_it_continues_where_it_ended(tmp_path):
    lines = "".join(main(tmp_path / "acks") for _ in range(8)).splitlines()
    assert lines[0] == "continues after 1:-1, acked above it: []"
    left = [int(re.search(r"of (\d+), refused 0", line)[1]) for line in lines[1::2]]
    assert left == sorted(left, reverse=True)
    assert (left[0], left[-1] < MESSAGES // 50) == (MESSAGES, True)
