"""A campaign runs layers until the budget is over, adds up, stores totals, and ends with an honest status."""

import itertools
import json
import shlex
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ackstate.analysis.cli import crash as crash_command
from ackstate.analysis.crash import campaign
from ackstate.analysis.crash.campaign import (
    CRASHES_MIN,
    FAILURES_MAX,
    Budget,
    CampaignError,
    Totals,
    failure_kind,
    read_totals,
    run_layer,
    write_totals,
)
from ackstate.analysis.crash.conversation import SubjectError
from ackstate.analysis.crash.oracle import BrokenPromise, Promise, RunOutcome
from ackstate.analysis.crash.runs import UNSEEN, LayerSkippedError
from command_line import assert_one_line, run

LOST = BrokenPromise(Promise.I2, "1:7 was lost", ("ack 1:7", "persist", "kill"))
NO_TIME = Budget(1e-9)


class FakeLayer:
    """Yields the given runs for given seeds, and clean runs of ten cycles for all others."""

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


def test_runs_are_added_up_seed_by_seed_at_least_one_of_them():
    once, totals = FakeLayer(), Totals(7)
    run_layer(once, totals, NO_TIME)
    assert (totals.runs, totals.cycles, totals.next_seed, totals.counts, once.closed) == (1, 10, 8, {"kills": 2}, 1)
    layer, totals = FakeLayer(seed_3={"cycles": 5, "lost_durable": 2, "invented": 1, "broken": (LOST,)}), Totals(2)
    shares = []
    run_layer(layer, totals, Budget(3_600, run_count_max=3), watch=lambda totals, share: shares.append(totals.runs))
    assert (totals.runs, totals.cycles, totals.lost_durable, totals.invented, totals.failed_runs) == (3, 25, 2, 1, 1)
    assert totals.next_seed == 5
    assert totals.counts == {"kills": 6}
    story = {"promise": LOST.promise, "found": LOST.found, "story": LOST.story}
    assert totals.failures == [{"seed": 3, **story, "count": 1, "last_seed": 3}]
    assert shares == [1, 2, 3]


@pytest.mark.parametrize(
    ("counted", "promise", "found"),
    [
        ({"invented": 2}, Promise.I1, "2 entries are invented"),
        ({"lost_durable": 1}, Promise.I2, "1 durable entries are lost"),
        ({"gauge_mismatch": 3}, Promise.I3, "3 times the gauge was wrong"),
    ],
)
def test_a_run_that_only_counts_is_a_failure_with_a_name(counted, promise, found):
    totals = Totals(0)
    assert run_layer(FakeLayer(seed_0=counted), totals, NO_TIME).has_failed
    assert totals.failed_runs == 1
    assert [(each["promise"], each["found"]) for each in totals.failures] == [(promise, found)]


def failing(found, count=30):
    """A layer whose runs are broken, each with what `found` returns for its seed, and a story of `seed` lines."""
    told = {seed: BrokenPromise(Promise.I9, found(seed), ("step",) * (40 - seed)) for seed in range(count)}
    return FakeLayer(**{f"seed_{seed}": {"cycles": 1, "broken": (broken,)} for seed, broken in told.items()})


def test_only_the_first_different_failures_are_stored_and_all_are_counted():
    kinds = {failure_kind("I2", found) for found in ("died of SIGSEGV", "died of SIGABRT", "lost: 1:[2, 3)", "lost")}
    assert len(kinds | {failure_kind("I1", "lost")}) == 5
    totals = Totals(0)
    run_layer(failing(lambda seed: "a" * (seed + 1)), totals, Budget(3_600, run_count_max=30))
    assert (len(totals.failures), totals.failed_runs) == (FAILURES_MAX, 30)


@pytest.mark.parametrize(
    "found",
    [
        lambda _: "a panic",
        lambda seed: f"status {seed}: 'at 0x{seed:x}f, line {seed}'",
        lambda seed: "lost: " + " ".join(f"{seed}:[{each}, 9)" for each in range(seed % 8 + 1)) + " ..." * (seed % 2),
    ],
)
def test_equal_failures_are_one_with_a_count_and_the_shortest_story(found):
    totals = Totals(0)
    run_layer(failing(found), totals, Budget(3_600, run_count_max=30))
    (failure,) = totals.failures
    assert (failure["count"], failure["last_seed"], failure["seed"], len(failure["story"])) == (30, 29, 29, 11)
    assert (failure["found"], totals.failed_runs) == (found(29), 30)


def test_totals_come_back_from_their_file_and_values_of_another_type_are_refused(tmp_path):
    file = tmp_path / "totals.json"
    assert read_totals(file) == {}
    totals = Totals(1)
    run_layer(FakeLayer(seed_1={"cycles": 1, "broken": (LOST,)}), totals, NO_TIME)
    write_totals(file, {"L3": totals})
    back = read_totals(file)["L3"]
    assert back.failures[0].pop("story") == list(totals.failures[0].pop("story"))
    assert back == totals
    plain = json.loads(file.read_text())
    values = dict.fromkeys(plain["layers"]["L3"], (None, -2, True)) | {"skipped": (None, 3)}
    values |= {
        "failures": (None, [1], [{"seed": 1}]),
        "counts": (None, {"kills": "2"}),
        "seconds": (-1.0, float("nan")),
    }
    for name, value in [(name, value) for name, bad_values in values.items() for value in bad_values]:
        layer = plain["layers"]["L3"] | {name: value}
        file.write_text(json.dumps(plain | {"layers": {"L3": layer}}))
        with pytest.raises(CampaignError, match=name):
            read_totals(file)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"version": 2}', '{"version": 2, "subject": "ours", "layers": []}',
     '{"version": 2, "subject": "ours", "layers": {"L0": {}}}', '{"version": 2, "layers": {}}',
     '{"version": [2], "layers": {}}', "[" * 100_000, "\xff"],
)  # fmt: skip
def test_a_file_that_holds_no_totals_is_refused_and_left_alone(tmp_path, text):
    file = tmp_path / "totals.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(CampaignError, match=r"totals\.json"):
        read_totals(file)
    assert file.read_bytes() == text.encode("latin-1")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A current directory for the files of failures."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def layers(monkeypatch):
    """Put layers of ours in the place of L3 and L4."""

    def put(l3, l4=skipping):
        entries = {
            "L3": crash_command.LayerEntry("kills", lambda *_: l3),
            "L4": crash_command.LayerEntry("power cuts", lambda *_: l4),
            "L5": crash_command.LayerEntry("damage", lambda *_: l3),
        }
        monkeypatch.setattr(crash_command, "LAYERS", entries)

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


def test_a_failure_is_printed_with_its_story_and_the_last_line_repeats_it(layers, capsys, tmp_path, monkeypatch):
    program = tmp_path / "my programs" / "mine.py"
    program.parent.mkdir()
    program.touch()
    python = str(Path(shutil.which("python3")))
    lost = replace(LOST, story=("ack 1:7", f'| File "{program}", line 3'))
    layers(FakeLayer(seed_8={"cycles": 1, "lost_durable": 1, "broken": (lost,)}))
    subject = shlex.join([python, str(program), "-x"])
    status, out, _ = crash(capsys, "--layer", "L3", "--seed", "8", "--runs", "1", "--subject", subject)
    assert status == 1
    assert "L3, seed 8: I2: a durable receipt survives any crash: 1:7 was lost\n  ack 1:7\n" in out
    assert out.endswith("\nackstate crash replay ackstate-crash-L3-seed-8.json\n")
    (file,) = tmp_path.glob("*.json")
    stored = json.loads(file.read_text())
    assert stored["subject"] == "python3 'my programs/mine.py' -x"
    assert stored["failures"][0]["story"] == ["ack 1:7", '| File ".../my programs/mine.py", line 3']
    assert str(tmp_path) not in file.read_text()


def test_a_replay_repeats_the_seed_of_the_file_until_it_fails_again(layers, capsys, tmp_path):
    layers(FakeLayer(seed_8={"cycles": 1, "broken": (LOST,)}))
    assert crash(capsys, "--layer", "L3", "--seed", "7", "--runs", "2").status == 1
    (file,) = tmp_path.glob("*.json")
    before, seeds = file.read_bytes(), []

    def sometimes(first_seed):
        seeds.append(first_seed)
        yield RunOutcome(first_seed, 1, broken=(LOST,) if len(seeds) == 3 else ())

    layers(sometimes)
    status, out, _ = crash(capsys, "replay", str(file), "--budget", "1h")
    assert (status, seeds) == (1, [8, 8, 8])
    assert out.endswith(f"\nackstate crash replay {file}\n")
    assert file.read_bytes() == before
    layers(FakeLayer())
    assert crash(capsys, "replay", str(file), "--budget", "1ms").status == 0


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"version": 2}, "version 2"), ({"version": "1"}, "version"), ({"subject": 3}, "subject is 3"),
        ({"failures": []}, "there is no failure"), ({"failures": [{"layer": "L3"}]}, "seed"), ({"failures": 3}, "int"),
        ({"failures": [{"layer": "L3", "seed": -1}]}, "seed is -1"),
        ({"failures": [{"layer": [], "seed": 1}]}, "layer is"),
        ({"failures": [{"layer": "L9", "seed": 1}]}, "'L9' is no layer"), (None, "not the failures"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_failures_is_refused_before_a_run(layers, capsys, tmp_path, changed, complaint):
    layers(layer := FakeLayer())
    whole = {"version": 1, "subject": "ours", "failures": [{"layer": "L3", "seed": 1}]}
    (tmp_path / "f.json").write_text("[" * 100_000 if changed is None else json.dumps(whole | changed))
    assert_one_line(crash(capsys, "replay", "f.json"), complaint)
    assert layer.closed == 0
    assert_one_line(crash(capsys, "replay", "missing.json"), "missing.json")


def test_junit_has_a_case_for_each_layer_with_its_verdict(layers, capsys):
    lost = replace(LOST, found="\x00 <lost>\ud800")
    layers(FakeLayer(seed_1={"cycles": 1, "broken": (lost,)}))
    assert crash(capsys, "--layer", "L3..L5", "--runs", "1", "--junit", "j.xml").status == 1
    suite = ElementTree.parse("j.xml").getroot()
    assert dict(suite.items()) == {
        "name": "ackstate crash",
        "tests": "3",
        "failures": "2",
        "errors": "0",
        "skipped": "1",
    }
    assert suite.find("testcase[@name='L3']/failure").text == "\n".join(LOST.story)
    assert suite.find("testcase[@name='L3']/failure").get("message").endswith(": ? <lost>?")
    assert suite.find("testcase[@name='L4']/skipped").get("message") == "L4 needs root"
    layers(FakeLayer(seed_1={"cycles": 1, "counts": DUE}))
    assert crash(capsys, "--layer", "L3", "--runs", "1", "--junit", "j.xml").status == 2
    assert "receipts for 1 of 1,000" in ElementTree.parse("j.xml").find("testcase/error").get("message")


def test_a_layer_that_was_skipped_says_why_and_alone_is_no_test(layers, capsys):
    layers(FakeLayer())
    status, out, err = crash(capsys, "--layer", "L4")
    assert (status, err) == (2, "ackstate: nothing was tested: no layer that was chosen can run here\n")
    assert "L4 was skipped: L4 needs root" in out
    assert crash(capsys, "--layer", "L3..L4", "--runs", "1").status == 0
    layers(lambda first_seed: (each for each in ()))
    status, out, _ = crash(capsys, "--layer", "L3")
    assert (status, "L3: not measured: nothing was tested: no run was completed" in out) == (2, True)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SubjectError("no licence"), OSError(28, "No space left")])
def test_a_failure_before_an_error_is_printed_and_is_the_status(layers, capsys, tmp_path, error):
    def ending(first_seed):
        raise error
        yield

    layers(failing(lambda _: "a panic", 3), ending)
    status, out, err = crash(capsys, "--layer", "L3..L4", "--seed", "2", "--runs", "1")
    assert (status, err.count("\n")) == (1, 1)
    assert f"L3, seed 2: {Promise.I9}: a panic" in out
    layer, options = FakeLayer(), ("--layer", "L3..L4", "--runs", "1", "--totals", str(tmp_path / "t"))
    layers(layer, ending)
    status, out, err = crash(capsys, *options)
    assert (status, "L3" in out, err.count("\n")) == (130 if isinstance(error, KeyboardInterrupt) else 2, True, 1)
    assert (read_totals(tmp_path / "t")["L3"].cycles, layer.closed) == (10, 1)


def test_a_long_story_is_shortened_and_whole_in_the_file(layers, capsys, tmp_path):
    story = tuple(f"step {number} {'x' * 400 * (number == 2)}" for number in range(1_000))
    layers(FakeLayer(seed_1={"cycles": 1, "broken": (BrokenPromise(Promise.I9, "a panic", story),)}))
    _, out, _ = crash(capsys, "--layer", "L3", "--runs", "1")
    shown = out[out.index("L3, seed 1") :]
    assert {"  step 0 ", "  step 999 "} <= set(shown.splitlines())
    assert shown.count("\n") <= 24
    assert max(map(len, shown.splitlines())) < 200
    (file,) = tmp_path.iterdir()
    assert f"  the whole story: {file.name}\n" in shown
    assert json.loads(file.read_text())["failures"][0]["story"] == list(story)


def test_the_file_of_a_failure_is_elsewhere_or_missing_if_it_cannot_be_here(layers, capsys, tmp_path, monkeypatch):
    def refuse(path, _):
        if not path.is_absolute() or is_full:
            raise OSError(28, "No space left on device")
        written.append(path)

    layers(failing(lambda _: "a panic", 1))
    monkeypatch.setattr(campaign, "write_atomically", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    written, is_full = [], False
    _, out, _ = crash(capsys, "--layer", "L3", "--seed", "0", "--runs", "1")
    assert out.endswith(f"\nackstate crash replay {written[0]}\n")
    is_full = True
    status, out, err = crash(capsys, "--layer", "L3", "--seed", "0", "--runs", "1")
    assert (status, out.count("  step\n")) == (1, 40)
    assert err == "ackstate: the failures could not be stored in a file: No space left on device\n"


def test_two_promises_of_one_run_have_one_story(layers, capsys):
    both = (LOST, BrokenPromise(Promise.I1, "1:8 was invented", LOST.story))
    layers(FakeLayer(seed_1={"cycles": 1, "broken": both}, seed_2={"cycles": 1, "broken": both}))
    _, out, _ = crash(capsys, "--layer", "L3", "--runs", "2")
    assert out.count("  ack 1:7\n") == out.count("replay") == 1
    assert f"{Promise.I1}: 1:8 was invented\n  ack 1:7\n" in out
    assert "  2 runs failed equally, the last with seed 2\n" in out


def test_totals_have_a_failure_at_once_and_go_on_where_the_last_campaign_ended(layers, capsys, tmp_path):
    """Whatever ends a campaign then; and only what it saw itself makes its status."""
    file, stored = tmp_path / "totals.json", []

    def looking(first_seed):
        yield RunOutcome(first_seed, 10, broken=(LOST,) if first_seed == 1 else ())
        stored.append(read_totals(file)["L3"].failed_runs)

    layers(looking)
    options = ("--layer", "L3", "--totals", str(file), "--json")
    campaigns = [crash(capsys, *options) for _ in range(3)]
    assert [each.status for each in campaigns] == [1, 0, 0]
    found = [json.loads(each.out)["layers"][0] for each in campaigns]
    assert [(each["next_seed"], each["cycles"], each["failed_runs"]) for each in found] == [
        (2, 10, 1), (3, 20, 1), (4, 30, 1),
    ]  # fmt: skip
    assert stored[:1] == [1]
    assert_one_line(crash(capsys, *options, "--seed", "9"), "omit --seed")
    assert_one_line(crash(capsys, *options, "--subject", "naive"), "totals of the subject 'ours', not of 'naive'")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        *((("--layer", text), "is no layer") for text in ("L9", "L5..L3", "", "L3..L9")),
        (("--budget", "60"), "'--budget': must be a duration such as 500ms, 5s, 1m or 1h, got '60'"),
        (("--runs", "0"), "--runs"),
        *((("--receipts-min", text), "must be above 0 and at most 1") for text in ("0", "1.1", "nan")),
        (("--totals", "/missing/totals.json"), "/missing"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_status_2_before_the_first_run(layers, capsys, options, complaint):
    layer = FakeLayer()
    layers(layer)
    assert_one_line(crash(capsys, *("--layer", "L3", "--runs", "1"), *options), complaint)
    assert layer.closed == 0, "it ran"


DUE = {"accepted_persists": 3, "durable_receipts": 1, "receipts_due": 1_000, "receipts_given": 1}
DUE |= {"crashes_after_receipt": CRASHES_MIN}
FEW = DUE | {"receipts_given": 250, "crashes_after_receipt": CRASHES_MIN - 1}


@pytest.mark.parametrize(
    ("counts", "least", "untested"),
    [
        (DUE | {"accepted_persists": 0, "durable_receipts": 0}, (), "nothing was tested: the subject never accepted"),
        (DUE | {"durable_receipts": 0}, (), "the subject never reported that an ack is durable: I2 was not tested"),
        (DUE, (), "the subject gave receipts for 1 of 1,000 requested acks that it should persist (0.1%;"),
        (DUE | {"receipts_given": 249}, (), "--receipts-min requires 25.0%): I2 was not tested"),
        (DUE | {"receipts_given": 250}, (), ""),
        (DUE, ("--receipts-min", "0.002"), "I2 was not tested"),
        (DUE, ("--receipts-min", "0.001"), ""),
        (FEW, (), "not measured: 1 run, 9 of 1 crashes came after a receipt that they could lose; a verdict needs 10"),
        (
            DUE | {f"{UNSEEN}x is mapped": 1, "receipts_given": 250},
            (),
            "not measured: some writes are not seen: x is m",
        ),
    ],
)
def test_a_subject_with_few_receipts_fails_no_run_and_does_not_pass(layers, capsys, counts, least, untested):
    layers(FakeLayer(seed_1={"cycles": 1, "counts": counts}))
    status, out, _ = crash(capsys, "--layer", "L3", "--runs", "1", *least)
    assert status == (2 if untested else 0)
    assert (untested or "L3: every promise held: 1 run, 10 of 1 crashes came after a receipt") in out


def test_each_layer_crashes_any_subject(monkeypatch, capsys):
    made = []
    for name, entry in crash_command.LAYERS.items():

        def make(subject, name=name):
            made.append((name, subject))
            return FakeLayer()

        monkeypatch.setitem(crash_command.LAYERS, name, replace(entry, make=make))
    assert crash(capsys, "--subject", "naive", "--runs", "1").status == 0
    assert crash(capsys, "--layer", "L2..L3", "--runs", "1").status == 0
    assert made == [("L2", "naive"), ("L3", "naive"), ("L4", "naive"), ("L6", "naive"), ("L2", "ours"), ("L3", "ours")]
