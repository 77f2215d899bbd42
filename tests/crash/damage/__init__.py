"""L5: a good store whose bytes are damaged must be refused, or keep its state, or report the loss.

One thing is damaged at a time: a bit, the length of a file, the bytes after its end, units of it that are swapped or
come from another store. Each copy is opened as a user would open it. Undetectable damage is counted separately: a cut
exactly at the end of a synced unit, and a last unit that looks as if a crash had left it (`Reach`).

Each offered repair is tried: it must open the store, give up exactly the announced acks, and leave a cursor that can be
written and opened again.

Counts: ``refused``, ``harmless``, ``reported``, ``border_cuts``; for openings with a repair ``repaired`` and, by kind,
``discard_damaged_records`` and so on; and the operations that created the good stores.
"""

from __future__ import annotations

import signal
import threading
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from enum import Enum
from itertools import count
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.crash import oracle
from ackstate.analysis.crash.oracle import BrokenPromise, Promise, RunOutcome
from ackstate.analysis.crash.runs import scratch_directory
from ackstate.cursor.recovery import UnreadableCursorError
from ackstate.errors import CorruptStateError, InvalidPositionError, UnsupportedVersionError
from ackstate.stores.base import StoreError
from crash.damage.kinds import Reach, flipped
from crash.damage.media import RecordMedium, SqliteMedium
from crash.damage.story import Story, open_story, repaired, what_fails_after, what_it_gave_up, write_story
from crash.quiet import quiet
from crash.steps import LEDGERS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.analysis.crash.oracle import Broken, State
    from crash.damage.media import Files

_PERSISTS_OF_SMALL = 3
_PIECE = 512  # flips per outcome, so that a budget can be kept
_SEEDS_OF_TURNS = (1, 0)  # of a closed store, which is one file, and of one that was killed, whose log has the rest
_BROKEN_MAX = 10  # per run; more would add nothing
_HANGS_AFTER_S = 20.0
_REFUSALS = (CorruptStateError, UnsupportedVersionError, StoreError, InvalidPositionError)


class Outcome(Enum):
    """The outcome of a damaged copy; the value is the name of its count."""

    REFUSED = "refused"
    HARMLESS = "harmless"
    REPORTED = "reported"
    BORDER_CUT = "border_cuts"


class HangError(Exception):
    """Opening a damaged copy did not end."""


def damage(first_seed):
    """Yield runs, each of many damaged copies of one store: small `SqliteStore`s, larger ones, and records in turn."""
    with scratch_directory("damage") as directory, quiet("ackstate"):
        sqlite, records = SqliteMedium(directory), RecordMedium()
        for seed in count(first_seed):
            turn, which = divmod(seed, 3)
            yield run(seed, (sqlite, records)[which - 1]) if which else bits_in_turn(seed, sqlite, turn)


def bits_in_turn(seed, medium, turn):
    """Flip the next bits of two small stores; consecutive turns flip every bit of the database and of the log.

    A database has 300,000 bits when it is empty, and each takes 4 ms: too long for one run; a soak continues from seed
    to seed. Counts ``bits_in_turn``.
    """
    story = Story()
    try:
        pieces = []
        for seed_of_turns in _SEEDS_OF_TURNS:
            good = good_store(seed_of_turns, medium, story := Story(), persist_count=_PERSISTS_OF_SMALL)
            log = medium.logs(good.files)[-1]
            pieces += [(good, log, begin) for begin in range(0, 8 * len(good.files[log.name]), _PIECE)]
    except Exception as error:  # before any damage
        return _not_made(seed, error, (medium.name, *story.steps))
    good, log, begin = pieces[turn % len(pieces)]
    piece = range(8 * len(good.files[log.name]))[begin : begin + _PIECE]
    judged = _judged(seed, medium, good, flipped(good.files, log.name, piece, log.reach_of_change))
    counts = Counter(judged.counts) + Counter(bits_in_turn=len(piece))
    return replace(judged, broken=(*good.broken(), *judged.broken)[:_BROKEN_MAX], counts=counts)


def run(seed, medium):
    story = foreign_story = Story()
    try:
        good = good_store(seed, medium, story)
        foreign_story = Story()
        foreign = good_store(seed + 1_000_003, medium, foreign_story).files
    except Exception as error:  # before any damage
        steps = (f"{medium.name}, the store of seed {seed} and then that of {seed + 1_000_003}", *foreign_story.steps)
        return _not_made(seed, error, steps)
    chance = Random(seed)
    judged = _judged(seed, medium, good, medium.damages(good.files, foreign, chance))
    counts = Counter(story.counts) + Counter(judged.counts) + Counter(bits_flipped_of=_bit_count(good.files))
    return replace(judged, broken=(*good.broken(), *judged.broken)[:_BROKEN_MAX], counts=counts)


def _judged(seed, medium, good, damages):
    counts = Counter()
    broken = []
    found = []
    cycles = 0
    for damaged in damages:
        judgement = judge(medium, good, damaged)
        cycles += 1
        counts += Counter(judgement.counts)
        counts["bits_flipped"] += damaged.is_flip
        found += judgement.found
        broken += judgement.broken if len(broken) < _BROKEN_MAX else ()
    return RunOutcome(seed, cycles, **oracle.counts(found), broken=tuple(broken[:_BROKEN_MAX]), counts=counts)


def _not_made(seed, error, steps):
    return RunOutcome(seed, 0, broken=(BrokenPromise(Promise.I10, f"{type(error).__name__}: {error}", steps),))


def _bit_count(files):
    return 8 * sum(map(len, files.values()))


class GoodStore(NamedTuple):
    """A store before any damage."""

    files: Files  # All of its files
    story: Story  # The steps that created it
    truth: State  # The state of its cursor when it is opened

    def broken(self):
        """Yield the promises that it breaks before any damage."""
        for broken in oracle.judge(self.truth, [self.story.expected(self.story.states[-1])]):
            yield BrokenPromise(broken.promise, f"in an undamaged copy: {broken.found}", tuple(self.story.steps))


def good_store(seed, medium, story=None, *, persist_count=None):
    """Create the store of a seed, and record the steps in a story; for `persist_count` see `write_story`."""
    chance = Random(seed)
    story = Story() if story is None else story
    is_closed = chance.random() < 0.5

    files = medium.write(
        lambda store: write_story(store, chance, story, persist_count=persist_count), is_closed=is_closed
    )
    with closing(medium.open(files)) as store:
        truth = open_story(store)[1].state
    return GoodStore(files, story, truth)


class DamageJudgement(NamedTuple):
    """The result of checking one damaged copy."""

    counts: Mapping[str, int]  # Its outcome, and the number of repairs tried
    broken: tuple[BrokenPromise, ...] = ()  # The broken promises
    found: Sequence[Broken] = ()  # Those of them that concern its state


def judge(medium, good, damaged):
    """Open a damaged copy as a user would; if its cursor is refused, also with each offered repair."""
    try:
        opened, is_reported = _opened(medium, damaged.files)
    except UnreadableCursorError as error:
        return _judge_repairs(medium, good, damaged, error)
    except _REFUSALS as error:
        where = () if str(error) else (_broken(Promise.ERRORS, "an error without a message", medium, good, damaged),)
        return DamageJudgement({Outcome.REFUSED.value: 1}, where)
    except Exception as error:
        return DamageJudgement({}, (_broken(Promise.ERRORS, repr(error), medium, good, damaged),))
    return _judge_state(opened, medium, good, damaged, is_reported=is_reported)


def _judge_state(opened, medium, good, damaged, *, is_reported):
    """Compare the cursor's state of a damaged copy with the truth, or with the state that may be left of it."""
    found = opened.state
    if found == good.truth:
        return DamageJudgement({Outcome.HARMLESS.value: 1})
    # The record keeps its cursor properties even if an earlier entry is lost.
    ignored = {} if medium.loses_newest_first else {"rest": (), "names": (), "is_new": False}
    newest_first = list(dict.fromkeys(state._replace(**ignored) for state in reversed(good.story.states)))
    # A torn last record was never promised.
    reach = max(damaged.reach, Reach.LAST) if is_reported else damaged.reach
    excused = newest_first[: min(len(newest_first), 1 + reach)]
    if not oracle.judge(found._replace(**ignored), [good.story.expected(state) for state in excused]):
        return DamageJudgement({(Outcome.REPORTED if is_reported else Outcome.BORDER_CUT).value: 1})
    broken = oracle.judge(found, [good.story.expected(good.truth)])
    return DamageJudgement({}, oracle.with_story(broken, _story(medium, good, damaged)), broken)


def _judge_repairs(medium, good, damaged, error):
    told = []
    found = []
    counts = Counter({Outcome.REFUSED.value: 1})
    for repair in error.repairs:
        try:
            with _no_longer_than(_HANGS_AFTER_S):
                state, least = repaired(medium, damaged.files, repair)
                wrong = what_it_gave_up(repair, state, least, good.story) or what_fails_after(medium, state)
        except Exception as unexpected:
            what = f"{repair.name}: {type(unexpected).__name__}: {unexpected}"
            told.append(_broken(Promise.REPAIRS, what, medium, good, damaged))
            continue
        counts += Counter({"repaired": 1, repair.name.lower(): 1})
        # Acks that it gave up are allowed, but not acks that it invents.
        for broken in oracle.judge(state, [good.story.expected(state)]):
            found.append(broken)
            told.append(_broken(broken.promise, f"{broken.found} with {repair.name}", medium, good, damaged))
        if wrong:
            told.append(_broken(Promise.REPAIRS, f"{repair.name}: {wrong}", medium, good, damaged))
    return DamageJudgement(counts, tuple(told), found)


def _opened(medium, files):
    """Return the cursor, and whether a loss was reported."""
    with _no_longer_than(_HANGS_AFTER_S), closing(medium.open(files)) as store:
        _, opened = open_story(store)
        return opened, opened.is_reported


def _broken(promise, found, medium, good, damaged):
    return BrokenPromise(promise, found, _story(medium, good, damaged))


def _story(medium, good, damaged):
    log = f"a message log {LEDGERS}"
    return (f"{medium.name}, {log}", *good.story.steps, f"then the only damage: {damaged.text}")


@contextmanager
def _no_longer_than(seconds):
    """Raise `HangError` after a time, if possible: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def _hang(*_):
        raise HangError(f"not open after {seconds} s")

    before = signal.signal(signal.SIGALRM, _hang)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
