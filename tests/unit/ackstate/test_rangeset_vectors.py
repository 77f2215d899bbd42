"""`DeletedRanges` answers as Pulsar's own range set did, in every recorded case, but for two named deviations.

The set of 5.0.1 differs from that of 5.0.0-M1 in `toRanges` alone, by its rule for the limit.

inverted: Pulsar ignores a range of one ledger that ends before it begins; here it is a caller's mistake and refused.

empty bitmap: Pulsar keeps a ledger whose bitmap is empty (after adding an empty range), and its firstRange, lastRange
and span then name that ledger with entry -2 or -1; here a ledger without acked entries is not there.
"""

import gzip
import json
from collections import Counter
from pathlib import Path

from ackstate import DeletedRanges, Position
from ackstate.wire.pulsar.ranges import LimitRule, Limits, RangeForm, apply_limits, words_of

VECTORS = Path(__file__).parents[2] / "vectors" / "rangeset.jsonl.gz"


def flat(pair):
    return pair and [*pair[0], *pair[1]]


def done(_count):
    return "ok"


ANSWERS = {
    "addOpenClosed": lambda ranges, lower, upper: done(ranges.add_open_closed(lower, upper)),
    "removeAtMost": lambda ranges, position: done(ranges.remove_at_most(position)),
    "contains": lambda ranges, position: position in ranges,
    "rangeContaining": lambda ranges, position: flat(ranges.range_containing(position)),
    "cardinality": lambda ranges, first, last: ranges.cardinality(first, last),
    "size": lambda ranges: ranges.range_count,
    "isEmpty": lambda ranges: len(ranges) == 0,
    "toString": str,
    "firstRange": lambda ranges: flat(ranges.first_range()),
    "lastRange": lambda ranges: flat(ranges.last_range()),
    "span": lambda ranges: flat(ranges.span()),
}


def words(ranges, range_count_max, rule):
    """What `toRanges` gives: the words form under the limit, by the rule of a release."""
    limits = Limits(range_count_max=range_count_max, rule=rule)
    kept, form = apply_limits(ranges, form=RangeForm.WORDS, limits=limits)
    return {str(i): words_of(bitmap) for i, bitmap in kept.kept.bitmaps()} if form is RangeForm.WORDS else {}


def deviation(name, args, expected):
    if name == "addOpenClosed" and args[0] == args[2] and args[3] < args[1]:
        return "inverted"
    # An end at -2, or a range from -1 to -1, is Pulsar's name for a ledger without any entry.
    if name in {"firstRange", "lastRange", "span"} and (expected[1] == -2 or expected[1] == expected[3] == -1):
        return "empty bitmap"
    return None


def test_every_recorded_answer_is_ours():
    answers, deviations = 0, Counter()
    with gzip.open(VECTORS, "rt") as lines:
        for case in map(json.loads, lines):
            ranges, of_501 = DeletedRanges(), iter(case.get("r501", ()))
            for name, *args, expected in case["ops"]:
                answers += 1
                if name == "toRanges":
                    # A ledger without any entry has no words.
                    deviations["empty bitmap"] += [] in expected.values()
                    for rule, answer in ((LimitRule.PULSAR_5_0_M1, expected), (LimitRule.PULSAR_5_0, next(of_501))):
                        held = {ledger_id: held for ledger_id, held in answer.items() if held}
                        assert words(ranges, *args, rule) == held, f"case {case['id']}: {name} {args}, {rule}"
                    continue
                positions = [Position(*args[index : index + 2]) for index in range(0, len(args), 2)]
                try:
                    found = ANSWERS[name](ranges, *positions)
                except ValueError:
                    found = "refused"
                if found != expected:
                    reason = deviation(name, args, expected)
                    assert reason, f"case {case['id']}: {name} {args} gives {found}, Pulsar {expected}"
                    deviations[reason] += 1
            ranges._check()
    assert answers > 10_000
    assert deviations == {"inverted": 154, "empty bitmap": 19}
