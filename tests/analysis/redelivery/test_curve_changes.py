"""Changes of curves in slices of time, without Spark."""

import numpy as np

from ackstate.analysis.redelivery.curve_changes import SERIES, batch_of, string_together, sum_changes


def change(number, ts_ms, deltas):
    """The changes of one subscription in a slice; of the series only the number itself changes."""
    delta = np.zeros((SERIES, len(deltas)), np.int64)
    delta[0] = deltas
    return (0, number, "t", "s", np.array(ts_ms), delta)


def points(batches):
    return [
        (batch["slice"][0].as_py(), batch["ts_ms"][0].as_py(), batch["delta"][0].as_py()[:2])
        for batch in batches
        if batch["subscription"][0].as_py() == "s"
    ]


def test_a_slice_shows_its_peak_and_its_end():
    changes = batch_of([change(0, [1, 2, 3], [5, -4, 1])])
    assert points(sum_changes([changes], wanted=frozenset({("t", "s")}))) == [(0, [1, 3], [5, 2])]


def test_of_many_slices_one_shows_the_highest_peak_and_the_last_end():
    rows = [change(0, [1, 3], [5, 2]), change(1, [11, 13], [9, 1]), change(2, [21, 23], [-1, -3])]
    # Levels: 5 and 2, then 2 + 9 and 2 + 1, then 3 - 1 and 3 - 3.
    assert points(string_together([batch_of(rows)], per_point=4)) == [(0, [11, 23], [11, 0])]
