"""Runs are asked for until the budget is over, added up, and kept in a file that the next campaign goes on from."""

from __future__ import annotations

import itertools
import json

import pytest

from analysis import crash_command
from analysis.crash.campaign import FAILURES_MAX, Budget, CampaignError, Totals, read_totals, run_layer, write_totals
from analysis.crash.layer import BrokenPromise, LayerSkippedError, RunOutcome
from command_line import assert_one_line, run

LOST = BrokenPromise("I2: a durable receipt survives any crash", "1:7 was lost", ("ack 1:7", "persist", "kill"))
NO_TIME = Budget(1e-9)
MUCH_TIME = Budget(3_600)


class FakeLayer:
    """Yields what it is told for given seeds, and clean runs of ten cycles for all others."""

    def __init__(self, **told):
        self.told = {int(seed.removeprefix("seed_")): values for seed, values in told.items()}
        self.closed = 0

    def __call__(self, first_seed):
        try:
            for seed in itertools.count(first_seed):
                yield RunOutcome(seed, **({"cycles": 10, "counts": {"kills": 2}} | self.told.get(seed, {})))
        finally:
            self.closed += 1


def skipping(first_seed):
    raise LayerSkippedError("L4 needs root")
    yield


def test_a_budget_is_a_number_with_a_unit():
    times = [Budget.parse(text).seconds for text in ("500ms", "60s", " 1.5m", "2h")]
    assert times == [0.5, 60.0, 90.0, 7_200.0]
    for text in ("", "60", "s", "-1s", "0s", "1 s", "1d", "nans", "1e3s", "9" * 400 + "s"):
        with pytest.raises(ValueError, match="not a budget"):
            Budget.parse(text)


def test_at_least_one_run_is_made_and_the_layer_is_closed():
    layer, totals = FakeLayer(), Totals(7)
    run_layer(layer, totals, NO_TIME)
    assert (totals.runs, totals.cycles, totals.next_seed, totals.counts, layer.closed) == (1, 10, 8, {"kills": 2}, 1)
    assert totals.failed_runs == 0


def test_runs_are_added_up_seed_by_seed():
    layer, totals = FakeLayer(seed_3={"cycles": 5, "lost_durable": 2, "invented": 1, "broken": (LOST,)}), Totals(2)
    shares = []
    run_layer(layer, totals, Budget(3_600, run_count_max=3), watch=lambda totals, share: shares.append(totals.runs))
    assert (totals.runs, totals.cycles, totals.lost_durable, totals.invented, totals.failed_runs) == (3, 25, 2, 1, 1)
    assert totals.next_seed == 5
    assert totals.counts == {"kills": 6}
    assert totals.failures == [{"seed": 3, "promise": LOST.promise, "found": LOST.found, "story": LOST.story}]
    assert shares == [1, 2, 3]


def test_a_run_that_only_counts_is_a_failure_with_a_name():
    totals = Totals(1)
    run_layer(FakeLayer(seed_1={"cycles": 1, "gauge_mismatch": 1}), totals, NO_TIME)
    assert totals.failed_runs == 1
    assert totals.failures[0]["found"] == "lost 0, invented 0, gauge wrong 1 times"


def test_only_the_first_failures_are_told_and_all_are_counted():
    totals = Totals(0)
    told = {f"seed_{seed}": {"cycles": 1, "broken": (LOST,)} for seed in range(30)}
    run_layer(FakeLayer(**told), totals, Budget(3_600, run_count_max=30))
    assert (len(totals.failures), totals.failed_runs) == (FAILURES_MAX, 30)


def in_pieces(first_seed):
    """Three outcomes a seed, of which the third of seed 4 is broken."""
    for seed in itertools.count(first_seed):
        for piece in range(3):
            broken = (LOST,) if (seed, piece) == (4, 2) else ()
            yield RunOutcome(seed, 10, broken=broken, is_last=piece == 2)


def test_a_run_that_is_told_in_pieces_is_one_run_and_one_failure():
    totals = Totals(4)
    run_layer(in_pieces, totals, Budget(3_600, run_count_max=1))
    assert (totals.runs, totals.cycles, totals.next_seed, totals.failed_runs) == (1, 30, 5, 1)


def test_a_run_that_is_cut_short_is_begun_anew_by_the_next_campaign():
    totals = Totals(5)
    run_layer(in_pieces, totals, NO_TIME)
    assert (totals.runs, totals.cycles, totals.next_seed) == (0, 10, 5)
    run_layer(in_pieces, totals, Budget(3_600, run_count_max=1))
    assert (totals.runs, totals.cycles, totals.next_seed) == (1, 40, 6)


def test_an_interruption_closes_the_layer_and_keeps_what_was_added():
    layer, totals = FakeLayer(), Totals(1)

    def interrupt(totals, share):
        if totals.runs == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_layer(layer, totals, MUCH_TIME, watch=interrupt)
    assert (totals.runs, totals.next_seed, layer.closed) == (2, 3, 1)


def test_a_layer_that_cannot_run_says_why_and_is_clean():
    totals = Totals(1)
    run_layer(skipping, totals, MUCH_TIME)
    assert (totals.skipped, totals.runs, totals.failed_runs) == ("L4 needs root", 0, 0)


def test_totals_come_back_from_their_file(tmp_path):
    file = tmp_path / "totals.json"
    assert read_totals(file) == {}
    totals = Totals(1)
    run_layer(FakeLayer(seed_1={"cycles": 1, "broken": (LOST,)}), totals, NO_TIME)
    write_totals(file, {"L3": totals})
    back = read_totals(file)["L3"]
    assert back.failures[0]["story"] == list(LOST.story)
    back.failures = totals.failures
    assert back == totals


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 1}', '{"version": 1, "layers": []}', '{"version": 1, "layers": {"L0": {}}}',
     '{"version": 2, "layers": {}}', "\xff"],
)  # fmt: skip
def test_a_file_that_holds_no_totals_is_refused_and_left_alone(tmp_path, text):
    file = tmp_path / "totals.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(CampaignError, match=r"totals\.json"):
        read_totals(file)
    assert file.read_bytes() == text.encode("latin-1")


def test_totals_of_another_type_are_refused(tmp_path):
    file = tmp_path / "totals.json"
    write_totals(file, {"L0": Totals(1)})
    plain = json.loads(file.read_text())
    for name in plain["layers"]["L0"]:
        bad = json.loads(file.read_text())
        bad["layers"]["L0"][name] = None
        other = tmp_path / "bad.json"
        other.write_text(json.dumps(bad))
        with pytest.raises(CampaignError, match=name):
            read_totals(other)


@pytest.fixture
def layers(monkeypatch):
    """Put layers of ours in the place of L3 and L4."""

    def put(l3, l4=skipping):
        entries = {
            "L3": crash_command._Entry("kills", lambda _: l3, takes_subject=True),
            "L4": crash_command._Entry("power cuts", lambda _: l4, takes_subject=True),
            "L5": crash_command._Entry("damage", lambda _: l3),
        }
        monkeypatch.setattr(crash_command, "_LAYERS", entries)

    return put


def crash(capsys, *options):
    return run(capsys, "crash", *options)


def test_the_json_has_sums_and_each_layer(layers, capsys):
    layers(FakeLayer(seed_5={"cycles": 3, "invented": 1, "broken": (LOST,)}))
    status, out, _ = crash(capsys, "--layer", "L3..L5", "--seed", "5", "--runs", "2", "--json")
    found = json.loads(out)
    assert status == 1
    assert [found[name] for name in ("cycles", "lost_durable", "invented", "gauge_mismatch")] == [26, 0, 2, 0]
    assert [layer["layer"] for layer in found["layers"]] == ["L3", "L4", "L5"]
    assert found["layers"][1]["skipped"] == "L4 needs root"
    assert found["layers"][0]["failures"][0]["story"] == list(LOST.story)


def test_a_failure_is_printed_with_its_story_and_how_to_see_it_again(layers, capsys):
    layers(FakeLayer(seed_8={"cycles": 1, "lost_durable": 1, "broken": (LOST,)}))
    status, out, _ = crash(capsys, "--layer", "L3", "--seed", "8", "--runs", "1", "--subject", "python3 mine.py -x")
    assert status == 1
    assert "L3, seed 8: I2: a durable receipt survives any crash: 1:7 was lost\n  ack 1:7\n  persist\n  kill\n" in out
    assert "again: ackstate crash --layer L3 --seed 8 --runs 1 --subject 'python3 mine.py -x'" in out


def test_a_layer_that_was_skipped_says_why(layers, capsys):
    layers(FakeLayer())
    status, out, _ = crash(capsys, "--layer", "L4")
    assert status == 0
    assert "L4 was skipped: L4 needs root" in out


def test_totals_go_on_where_the_last_campaign_ended(layers, capsys, tmp_path):
    layers(FakeLayer())
    options = ("--layer", "L3", "--runs", "2", "--totals", str(tmp_path / "totals.json"), "--json")
    first = json.loads(crash(capsys, *options)[1])["layers"][0]
    again = json.loads(crash(capsys, *options)[1])["layers"][0]
    assert [first["next_seed"], again["next_seed"]] == [3, 5]
    assert [first["cycles"], again["cycles"]] == [20, 40]
    status, _, err = crash(capsys, *options, "--seed", "9")
    assert status == 2
    assert "omit --seed" in err


def test_only_what_this_campaign_saw_makes_its_status(layers, capsys, tmp_path):
    layers(FakeLayer(seed_1={"cycles": 1, "broken": (LOST,)}))
    options = ("--layer", "L3", "--runs", "1", "--totals", str(tmp_path / "totals.json"), "--json")
    assert crash(capsys, *options).status == 1
    again = crash(capsys, *options)
    assert (again.status, json.loads(again.out)["failed_runs"]) == (0, 1)


def test_an_interrupted_campaign_leaves_its_totals(layers, capsys, tmp_path):
    def interrupted(first_seed):
        yield RunOutcome(first_seed, 10)
        raise KeyboardInterrupt

    layers(interrupted)
    file = tmp_path / "totals.json"
    status, _, err = crash(capsys, "--layer", "L3", "--budget", "1h", "--totals", str(file))
    assert (status, err) == (130, "ackstate: interrupted\n")
    assert read_totals(file)["L3"].cycles == 10


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--layer", "L9"), "'L9' is no layer"),
        (("--layer", "L5..L3"), "is no layer"),
        (("--layer", ""), "is no layer"),
        (("--budget", "60"), "not a budget: '60'"),
        (("--runs", "0"), "--runs"),
        (("--layer", "L5", "--subject", "naive"), "L5 looks inside our own"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_2(layers, capsys, options, complaint):
    layer = FakeLayer()
    layers(layer)
    assert_one_line(crash(capsys, *options), complaint)
    assert layer.closed == 0, "it ran"


def test_totals_of_another_subject_are_refused(layers, capsys, tmp_path):
    layers(FakeLayer())
    options = ("--layer", "L3", "--runs", "1", "--totals", str(tmp_path / "totals.json"))
    assert crash(capsys, *options, "--subject", "naive").status == 0
    assert_one_line(crash(capsys, *options), "totals of the subject 'naive', not of 'ours'")
    assert crash(capsys, *options, "--subject", "naive").status == 0


def test_totals_that_cannot_be_written_are_noticed_before_the_first_run(layers, capsys, tmp_path):
    layer = FakeLayer()
    layers(layer)
    outcome = crash(capsys, "--layer", "L3", "--runs", "1", "--totals", str(tmp_path / "missing" / "totals.json"))
    assert_one_line(outcome, "missing")
    assert layer.closed == 0, "it ran"


def test_a_trace_is_not_put_beside_another(layers, capsys, tmp_path):
    layers(FakeLayer())
    (tmp_path / "000001.events").write_bytes(b"")
    assert_one_line(crash(capsys, "--layer", "L3", "--trace", str(tmp_path)), "holds a recording already")


def test_a_subject_without_receipts_fails_no_run_and_is_not_passed(layers, capsys):
    counts = {"accepted_persists": 3, "durable_receipts": 0}
    layers(FakeLayer(seed_1={"cycles": 1, "counts": counts}))
    assert crash(capsys, "--layer", "L3", "--runs", "1").status == 2
    layers(FakeLayer(seed_1={"cycles": 1, "counts": counts | {"durable_receipts": 1}}))
    assert crash(capsys, "--layer", "L3", "--runs", "1").status == 0
