"""L5 finds nothing in our store, and every bit of a small one is flipped."""

from itertools import islice
from random import Random

import pytest

from ackstate.analysis.crash.oracle import Promise
from ackstate.cursor.formats import Repair
from ackstate.cursor.journal import Journal
from ackstate.stores import sqlite_database
from ackstate.stores.base import StoreError
from crash import damage as layer
from crash.damage import Outcome, damage, good_store, judge, run
from crash.damage.kinds import LogFile, Reach, damages, flipped
from crash.damage.media import RecordMedium, SqliteMedium

DATABASE, LOG = sqlite_database.DATABASE, f"{sqlite_database.DATABASE}-wal"


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Fewer flips than in earnest."""
    monkeypatch.setattr(SqliteMedium, "flips_max", 20)
    monkeypatch.setattr(layer, "_PERSISTS_OF_SMALL", 1)


@pytest.fixture
def sqlite(tmp_path):
    return SqliteMedium(tmp_path)


def promises(outcomes):
    return {broken.promise for outcome in outcomes for broken in outcome.broken}


@pytest.mark.slow
def test_a_slice_of_the_layer_finds_nothing(monkeypatch):
    monkeypatch.setattr(layer, "_PIECE", 50)
    outcomes = list(islice(damage(0), 12))
    assert [outcome.seed for outcome in outcomes] == list(range(12))
    assert promises(outcomes) == set()
    assert sum(outcome.cycles for outcome in outcomes) > 800
    # Every fate was met, so none of them is waved through.
    met = {name for outcome in outcomes for name, count in outcome.counts.items() if count}
    assert {fate.value for fate in Outcome} | {"repaired"} <= met
    assert {repair.name.lower() for repair in Repair if repair is not Repair.NONE} <= met
    assert {"batches", "deltas", "mark_deletes", "native_stores", "properties", "pulsar_stores", "snapshots"} <= met
    assert run(2, RecordMedium()) == outcomes[2]
    assert sum(outcome.counts.get("bits_in_turn", 0) for outcome in outcomes) == 200


def test_every_way_to_damage_a_file_is_a_change_of_one_file_and_can_be_done_again():
    files = {"log": bytes(range(60)), "other": b"left alone"}
    log = LogFile("log", [0, 20, 40, 60], cut_size_min=20, hides_last=True)
    found = list(damages(files, log, bytes(60), Random(1), flips=480))
    assert found == list(damages(files, log, bytes(60), Random(1), flips=480))
    assert all(each.files.get("other") == b"left alone" for each in found)
    assert all(each.files.get("log") != files["log"] for each in found)
    flips = [each for each in found if "flipped" in each.text]
    assert len({each.files["log"] for each in flips}) == 480
    cuts = [each for each in found if "cut" in each.text]
    assert {each.reach for each in cuts if len(each.files["log"]) < 20} == {Reach.NONE}
    assert {each.reach for each in cuts if len(each.files["log"]) >= 20} == {Reach.ANY}


def test_where_another_store_ends_it_has_no_unit_to_give():
    log = LogFile("log", [0, 20, 40, 60], cut_size_min=20, hides_last=False)
    foreign = bytes(range(1, 41))
    found = list(damages({"log": bytes(range(60, 120))}, log, foreign, Random(1), flips=10))
    assert [each.text for each in found if "another" in each.text] == [
        "log: unit 0 of another store", "log: unit 1 of another store"
    ]  # fmt: skip


@pytest.mark.parametrize(("frames", "reach"), [(41, Reach.LAST_TWO), (42, Reach.LAST_THREE)])
def test_a_frame_in_two_sectors_may_be_hidden_by_the_one_before_it(sqlite, frames, reach):
    (log,) = sqlite.logs({f"{sqlite_database.DATABASE}-wal": bytes(32 + frames * 4120)})
    assert (log.reach_of_loss, log.reach_of_change) == (reach, Reach.LAST)


def test_turns_that_follow_each_other_flip_every_bit_of_a_database_and_of_a_log_and_begin_again(monkeypatch, sqlite):
    goods = {seed: good_store(seed, sqlite, persist_count=1) for seed in layer._SEEDS_OF_TURNS}
    assert [list(good.files) for good in goods.values()] == [[DATABASE], [DATABASE, LOG]]
    monkeypatch.setattr(layer, "good_store", lambda seed, *_, **__: goods[seed])
    pieces = []
    monkeypatch.setattr(layer, "flipped", lambda _files, name, bits, _reach: pieces.append((name, bits)) or [])
    monkeypatch.setattr(layer, "_PIECE", 4_096)
    closed, killed = goods.values()
    sizes = {DATABASE: 8 * len(closed.files[DATABASE]), LOG: 8 * len(killed.files[LOG])}
    assert min(sizes.values()) > 200_000
    count = sum(-(-size // layer._PIECE) for size in sizes.values())
    told = [layer.bits_in_turn(seed, sqlite, seed).counts["bits_in_turn"] for seed in range(7, 7 + count)]
    for name, size in sizes.items():
        assert sorted(bit for of, bits in pieces if of == name for bit in bits) == list(range(size))
    assert sum(told) == sum(sizes.values())
    layer.bits_in_turn(0, sqlite, 7 + count)
    assert pieces[-1] == pieces[0]


@pytest.mark.soak
def test_no_flipped_bit_of_a_small_store_is_overlooked(sqlite):
    """Every bit of the schema and of the table of ledgers, and every one that is set of the rest."""
    for seed in layer._SEEDS_OF_TURNS:
        good = good_store(seed, sqlite, persist_count=1)
        log = sqlite.logs(good.files)[-1]
        content = good.files[log.name]
        bits = [bit for bit in range(8 * len(content)) if bit < 2 * 8 * 4096 or content[bit // 8]]
        for damaged in flipped(good.files, log.name, bits, log.reach_of_change):
            assert judge(sqlite, good, damaged).broken == ()


def test_one_bit_of_a_small_database_that_makes_trouble_is_found_and_told(monkeypatch, sqlite):
    goods = {seed: good_store(seed, sqlite, persist_count=1) for seed in layer._SEEDS_OF_TURNS}
    monkeypatch.setattr(layer, "good_store", lambda seed, *_, **__: goods[seed])
    monkeypatch.setattr(layer, "_PIECE", 8)
    monkeypatch.setattr(SqliteMedium, "reopen", stumbles_over(SqliteMedium.reopen, b"SQLite format 3\0", bit=2))
    broken = [broken for turn in range(16) for broken in layer.bits_in_turn(0, sqlite, turn).broken]
    assert [each.promise for each in broken] == [Promise.ERRORS]
    assert broken[0].story[-1] == f"then the only damage: {sqlite_database.DATABASE}: bit 2 of byte 15 flipped"


def stumbles_over(reopen, magic, *, bit):
    """Return a way to open that meets one bit of the last byte of a magic with no error of ours."""
    troubling = magic[:-1] + bytes([magic[-1] ^ 1 << bit])

    def stumbles(self):
        if (self._directory / "store" / sqlite_database.DATABASE).read_bytes().startswith(troubling):
            raise KeyError("header")
        return reopen(self)

    return stumbles


def test_a_good_store_that_cannot_be_written_is_told_with_its_seed_and_story(monkeypatch):
    def fails(self, *_, **__):
        raise StoreError("the disk is gone")

    monkeypatch.setattr(Journal, "prepare", fails)
    monkeypatch.setattr(Journal, "write_record", fails)
    outcome = run(4, RecordMedium())
    (broken,) = outcome.broken
    assert len(broken.story) > 2
    assert (outcome.seed, broken.promise) == (4, Promise.I10)
    assert "the disk is gone" in broken.found
    assert "seed 4" in broken.story[0]
