"""A state that is damaged, or made to do harm, is refused in one line that names the field; nothing else is raised."""

from __future__ import annotations

import base64
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from ackstate.analysis.estimate.daily_state import decoded, decoded_broker
from ackstate.analysis.replay.state_fields import CheckpointError
from ackstate.analysis.trace.events import TraceError
from ackstate.errors import UnsupportedVersionError
from golden_states import CUT_MS, GRID, golden, parts, policies_of, run
from strategies import few

REFUSALS = (CheckpointError, UnsupportedVersionError)
NAMES = [*GRID, "broker"]


def read(name, text):
    return decoded_broker(text, 2) if name == "broker" else decoded(text, policies_of(name))


def places(value, path=()):
    """Yield the path of every value in a state, but for those of numbers in a list beyond the first two."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def at(state, path):
    for key in path:
        state = state[key]
    return state


def replaced(name, path, value):
    """Return a golden state with another value somewhere."""
    state = json.loads(golden(name))
    if not path:
        return json.dumps(value)
    at(state, path[:-1])[path[-1]] = value
    return json.dumps(state)


PLACES = {name: list(places(json.loads(golden(name)))) for name in NAMES}
NUMBERS = st.one_of(st.integers(-3, 300), st.integers(), st.sampled_from((2**31, 2**32, 2**61, 2**63, 2**64, 10**400)))
BITMAPS = st.sets(st.integers(0, 70) | st.just(2**32 - 1), max_size=20).map(
    lambda entries: base64.b64encode(BitMap(entries).serialize()).decode()
)
OTHERS = st.one_of(
    NUMBERS, BITMAPS, st.booleans(), st.none(), st.floats(), st.text(max_size=5), st.binary(max_size=30).map(repr),
    st.lists(NUMBERS, max_size=3), st.lists(st.tuples(NUMBERS, BITMAPS).map(list), max_size=3),
    st.lists(st.tuples(NUMBERS, NUMBERS).map(list), max_size=3), st.just({}), st.just([{}]), st.just([[]]),
)  # fmt: skip


@st.composite
def changed(draw):
    """A golden state of which one to three values were changed, removed, or put in twice."""
    name = draw(st.sampled_from(NAMES))
    state = json.loads(golden(name))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(PLACES[name][1:]))
        try:
            holder = at(state, path[:-1])
            value = holder[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue
        if not isinstance(holder, dict | list):
            continue
        match draw(st.sampled_from(("other", "other", "near", "remove", "twice"))):
            case "near" if type(value) is int:
                holder[path[-1]] = value + draw(st.sampled_from((-1, 1, 90, 1_000)))
            case "remove":
                del holder[path[-1]]
            case "twice" if isinstance(holder, list):
                holder.append(copy.deepcopy(value))
            case _:
                holder[path[-1]] = draw(OTHERS)
    return name, json.dumps(state)


a_few = settings(max_examples=2 * few.max_examples)


def refusal(call, *refusals):
    """Return the message of a refusal; None if the call succeeds."""
    try:
        call()
    except refusals as error:
        return str(error)
    return None


@a_few
@given(changed())
def test_a_changed_state_is_refused_or_continued(mutant):
    name, text = mutant
    said = refusal(lambda: read(name, text), *REFUSALS)
    if said is None and name != "broker":
        late = parts(name)[1]
        said = refusal(lambda: run(name, late, state=text, first_ms=CUT_MS), *REFUSALS, TraceError)
    assert "\n" not in (said or "")


@a_few
@given(st.sampled_from(NAMES), st.data())
def test_a_changed_text_is_refused_or_read(name, data):
    text = golden(name)
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(begin + 40, len(text))))
    other = data.draw(st.text(max_size=3) | st.sampled_from(("[" * 100_000, "9" * 5_000, "NaN", "1e999", '{"', "\x00")))
    said = refusal(lambda: read(name, text[:begin] + other + text[end:]), *REFUSALS)
    assert "\n" not in (said or "")


@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_needed_and_none_is_added(name):
    fields = [path for path in PLACES[name] if path and isinstance(path[-1], str)]
    assert len(fields) > 10
    for path in fields:
        state = json.loads(golden(name))
        del at(state, path[:-1])[path[-1]]
        with pytest.raises(REFUSALS, match=rf"{path[-1]} is missing|unknown field"):
            read(name, json.dumps(state))
    for path in {(*path[:-1], "extra") for path in fields}:
        with pytest.raises(CheckpointError, match=r"has an unknown field, 'extra'$"):
            read(name, replaced(name, path, 1))


CURSOR = ("replay", "groups", 0, "replays", 0, "cursor")


@pytest.mark.parametrize(("path", "value", "said"), [
    ((), [], "it must be an object, got []"),
    (("replay", "is_alive"), 1, "replay.is_alive must be true or false, got 1"),
    (("replay", "log"), [[2, 5], [1, 5]], "replay.log must be rising ledger ids with entry counts up to 2**32, got"),
    (("replay", "curves"), [], "replay.curves must be one for each policy, of its kind, got []"),
    (("replay", "groups", 0, "replays", 0, "policy"), 0, "groups[0].replays[0].policy must be one that is replayed"),
    (("replay", "groups", 0, "replays", 0, "kind"), "gated", "replays[0].kind must be 'with a cursor', got 'gated'"),
    ((*CURSOR, "mark_delete"), [1, 2**32], "cursor.mark_delete must be a position, got [1, 4294967296]"),
    ((*CURSOR, "mark_delete"), [9, 9], "cursor.mark_delete must be at most the end of the message log, 3:59, got"),
    ((*CURSOR, "fresh"), [[1, "AAAA"]], "cursor.fresh must be a portable roaring bitmap, got 'AAAA'"),
    ((*CURSOR, "fresh"), [[1, "OjAAAAAAAAA="]], "cursor.fresh must be without empty bitmaps, got 1"),
    ((*CURSOR, "acked"), [], "cursor.acked must be the union of the journal, fresh, held_back and cut_off, got '[]'"),
    ((*CURSOR, "journal", "last_entries"), [], "cursor.journal.last_entries must be"),
    ((*CURSOR, "journal", "pointer"), "QUNLUA==", "cursor.journal: cursor pointer"),
    (("plotted", 0, "width_ms"), 3, "plotted[0].width_ms must be a power of two, got 3"),
    (("plotted", 1, "values"), [0], "plotted[1].values must be a list of"),
])  # fmt: skip
def test_what_is_wrong_is_named(path, value, said):
    with pytest.raises(CheckpointError) as refused:
        read("ranges", replaced("ranges", path, value))
    assert str(refused.value).startswith("the state is damaged: ")
    assert said in str(refused.value)


def test_the_file_and_the_subscription_are_named():
    with pytest.raises(CheckpointError) as refused:
        run("ranges", parts("ranges")[1], state=replaced("ranges", ("replay", "log"), 1), first_ms=CUT_MS)
    assert str(refused.value) == (
        "states: subscription 's' of persistent://p/n/t: the state is damaged: replay.log must be a list, got 1; start "
        "again with another --state"
    )


FULL = base64.b64encode(BitMap(range(2**16)).serialize()).decode()
LARGE = [
    (("replay", "log"), [[each, 2**32] for each in range(1, 10_000)]),
    (("replay", "recorded"), {"complete_below": 2**63 - 1, "entries": [[each, FULL] for each in range(1_000)]}),
    ((*CURSOR, "journal", "entry_count"), 2**61),
    ((*CURSOR, "journal", "pointer"), base64.b64encode(b"ACKP" + b"\xff" * 70).decode()),
    ((*CURSOR, "young_age", "marks"), {name: [*range(99_999)] for name in ("ts_ms", "ledger_id", "entry_id")}),
    (("plotted", 0, "width_ms"), 2**60),
    (("plotted", 0, "begin_ms"), -(2**61)),
]
MEASURED = """
import json, resource, sys
from test_state_damage import REFUSALS, read
from golden_states import golden
read("ranges", golden("ranges"))
texts = json.load(sys.stdin)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for text in texts:
    try:
        read("ranges", text)
    except REFUSALS:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_counts_that_nothing_stands_behind_take_no_memory():
    texts = json.dumps([replaced("ranges", *each) for each in LARGE])
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parents[2], here.parents[3])))
    done = subprocess.run(
        [sys.executable, "-P", "-c", MEASURED], check=True, input=texts, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    # In KiB, some of it for the texts themselves.
    assert int(done.stdout) < 40_000 + 10 * len(texts) // 1024
