"""Kill, recover, count, compare: one point of a calibration after the other."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple, cast

from ackstate.analysis.crash.layer import LayerSkippedError, scratch_directory
from ackstate.analysis.crash.loop_disk import LoopDisk, with_private_mounts
from ackstate.analysis.replay.policy import Policy
from ackstate.stores.memory import MemoryStore
from benchmarks.calibration.mistakes import mistakes
from benchmarks.calibration.player import Player, RecoveryResult, open_store, over_store, recover
from benchmarks.calibration.points import grid
from benchmarks.calibration.prediction import TracePrediction
from benchmarks.calibration.processes import WorkerProcess, apart, uninterrupted
from benchmarks.calibration.results import EVENT, MOMENT, PERSIST, Calibration, Death, PointResult

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from benchmarks.calibration.points import Point
    from benchmarks.calibration.workload import CalibrationWorkload, Instant

_PLAYED, _PERSISTING, _PERSISTED = b".", b"p", b"d"
# How long after its begin a persist is interrupted, in powers of ten of a second: it takes a fraction of a millisecond
# in memory, and more on a busy machine.
_INTERRUPTED_AFTER = (-5.0, -2.7)
_MOUNT_OPTIONS = ("", "noauto_da_alloc,data=writeback")


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """How much is done.

    Attributes:
        points: The number of points of the grid.
        kills: A point, at random moments; half as many again after random events and while persists are under way.
        power_cuts: A point.
        seed: Decides the traffic and the moments.
        assumed: Settings for the estimate instead of a point's own, to check that the mistake is detected.

    Raises:
        ValueError: A number is out of range.
        PolicyError: A setting is unknown or malformed.
    """

    points: int = 60
    kills: int = 20
    power_cuts: int = 4
    seed: int = 1
    assumed: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name, least in (("points", 1), ("kills", 1), ("power_cuts", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {least} or more")
        Policy.from_mapping(self.assumed or {})

    def policy_for_estimate(self, point: Point) -> Policy:
        """Return the policy under which the estimate replays a point's trace.

        Raises:
            PolicyError: A setting is unknown or malformed.
        """
        return Policy.from_mapping(point.policy.to_mapping() | dict(self.assumed or {}))

    def grid(self) -> list[Point]:
        """Return the points."""
        return grid(self.points, self.seed)

    def replayed(self) -> list[tuple[CalibrationWorkload, Policy]]:
        """Return the workload and the policy of each point's replay."""
        return [(point.workload, self.policy_for_estimate(point)) for point in self.grid()]


class _KillMoment(NamedTuple):
    """When a process is to die."""

    when: str
    instant: Instant


def kill_points(plan: CalibrationPlan, progress: Callable[[str, float], None]) -> Iterator[PointResult]:
    """Yield the result of each point, without its power cuts.

    Args:
        plan: The plan of the run.
        progress: Called with the current step and its completed share.

    Raises:
        CalibrationError: A process did not get as far as its death.
        PolicyError: `CalibrationPlan.assumed` makes no policy.
        OSError: There is no room.
    """
    points = plan.grid()
    with scratch_directory("calibration") as directory:
        for number, point in enumerate(points):
            yield kill_point(point, plan, directory)
            progress(f"killed {number + 1} of {len(points)}: {point.label}", (number + 1) / len(points))


def kill_point(point: Point, plan: CalibrationPlan, directory: Path) -> PointResult:
    """Return the result of one point, without its power cuts.

    Args:
        point: The point, which need not be of the plan's grid.
        plan: As `kill_points`.
        directory: Where stores are made, and removed.

    Raises:
        CalibrationError, PolicyError, OSError: As `kill_points`.
    """
    chance = Random(f"kills {plan.seed} {point.label}")
    others = -(-plan.kills // 4)
    moments = _moments(point, chance, (plan.kills, others, others))
    prediction = _prediction(point, plan, moments)
    deaths = [_die(point, each, prediction, chance, directory, WorkerProcess.kill) for each in moments]
    return PointResult(point.shape, "sqlite", point.policy.to_mapping(), tuple(deaths), (), prediction.expected)


def cut_points(plan: CalibrationPlan, progress: Callable[[str, float], None]) -> list[tuple[Death, ...]]:
    """Return the observed power cuts of each point.

    Raises:
        LayerSkippedError: There is no disk whose power can be cut; the message gives the reason.
        CalibrationError, PolicyError, OSError: As `kill_points`.
    """
    found: list[tuple[Death, ...]] = []
    items = with_private_mounts(partial(_cut_all, plan))
    with closing(cast("Generator[tuple[Death, ...]]", items)):
        for deaths in items:
            found.append(deaths)
            progress(f"power cut at {len(found)} of {plan.points} points", len(found) / plan.points)
    return found


def _cut_all(plan: CalibrationPlan) -> Iterator[tuple[Death, ...]]:
    for number, point in enumerate(plan.grid()):
        with LoopDisk(_MOUNT_OPTIONS[number % len(_MOUNT_OPTIONS)]) as disk:
            yield _cut(point, plan, disk)


def _cut(point: Point, plan: CalibrationPlan, disk: LoopDisk) -> tuple[Death, ...]:
    chance = Random(f"power cuts {plan.seed} {point.label}")
    persists = plan.power_cuts // 2
    moments = _moments(point, chance, (0, plan.power_cuts - persists, persists))
    prediction = _prediction(point, plan, moments)

    def cut(life: WorkerProcess) -> bytes:
        # It still runs during the power cut, and its later output does not count.
        said = life.said()
        disk.cut_power()
        life.kill()
        disk.power_on()
        return said

    return tuple(_die(point, each, prediction, chance, disk.directory, cut) for each in moments)


def _prediction(point: Point, plan: CalibrationPlan, moments: Sequence[_KillMoment]) -> TracePrediction:
    instants = [each for moment in moments for each in _undecided(point.workload, moment)]
    return TracePrediction(point.workload, plan.policy_for_estimate(point), instants)


def _moments(point: Point, chance: Random, counts: tuple[int, int, int]) -> list[_KillMoment]:
    """Return the moments of death: random ones, after events, and during persists if there are any."""
    workload, (at_moments, after_events, in_persists) = point.workload, counts
    moments = [_KillMoment(MOMENT, workload.some_moment(chance)) for _ in range(at_moments)]
    moments += [_KillMoment(EVENT, workload.some_event(chance)) for _ in range(after_events)]
    if in_persists and (times := _persist_times(point)):
        ticks = [workload.before_tick_at(chance.choice(times)) for _ in range(in_persists)]
        moments += [_KillMoment(PERSIST, tick) for tick in ticks]
    return moments


def _persist_times(point: Point) -> list[int]:
    """Return the ticks at which the cursor persists, determined by playing it once in memory."""
    player = Player(point.workload, point.policy, over_store(MemoryStore(), point.policy))
    player.play(point.workload.end_of(point.workload.end_ms))
    return player.persisted_ms


@uninterrupted()
def _die(  # noqa: PLR0913, PLR0917 - parameters of a death
    point: Point,
    moment: _KillMoment,
    prediction: TracePrediction,
    chance: Random,
    parent: Path,
    die: Callable[[WorkerProcess], bytes],
) -> Death:
    """Live until a moment in a process, die, recover in another, and count.

    `die` ends the process, and returns its output that counts.
    """
    directory = Path(tempfile.mkdtemp(prefix="life-", dir=parent))
    try:
        with WorkerProcess(partial(_live, point, moment, directory)) as life:
            if moment.when == PERSIST:
                life.wait_for(_PERSISTING)
                time.sleep(10 ** chance.uniform(*_INTERRUPTED_AFTER))
            else:
                life.wait_for(_PLAYED)
            said = die(life)
        found = apart(partial(_recovered, point, moment, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    instants = _undecided(point.workload, moment)
    # It reports this after the sync, when the persist is complete.
    instants = instants[-1:] if _PERSISTED in said else instants
    predicted = tuple(prediction.at(each) for each in instants)
    at_ms = moment.instant.until_ms - point.workload.begin_ms
    return Death(moment.when, at_ms, predicted, found.lost, found.invented)


def _undecided(workload: CalibrationWorkload, moment: _KillMoment) -> list[Instant]:
    """Return the instants at one of which it dies."""
    if moment.when != PERSIST:
        return [moment.instant]
    return [moment.instant, workload.end_of(moment.instant.until_ms)]


def _live(point: Point, moment: _KillMoment, directory: Path, say: Callable[[bytes], None]) -> None:
    player = Player(point.workload, point.policy, open_store(directory / "store", point.policy))
    player.play(moment.instant)
    if moment.when == PERSIST:
        say(_PERSISTING)
        if player.tick(moment.instant.until_ms):
            say(_PERSISTED)
    say(_PLAYED)


def _recovered(point: Point, moment: _KillMoment, directory: Path) -> RecoveryResult:
    with closing(open_store(directory / "store", point.policy)) as store:
        return recover(point.workload, point.policy, store, moment.instant)


def calibrate(plan: CalibrationPlan, progress: Callable[[str, float], None]) -> Calibration:
    """Do all of a plan but for Spark's part.

    Args:
        plan: How much is done.
        progress: Called with the current step and its completed share.

    Raises:
        CalibrationError, PolicyError, OSError: As `kill_points`.
    """
    points = list(kill_points(plan, progress))
    skipped = "" if plan.power_cuts else "none were requested"
    if plan.power_cuts:
        try:
            cuts = cut_points(plan, progress)
        except LayerSkippedError as error:
            skipped = str(error)
        else:
            points = [_with_cuts(*each) for each in zip(points, cuts, strict=True)]
    found = mistakes(plan.grid(), points, progress)
    return Calibration(plan.seed, dict(plan.assumed or {}), tuple(points), skipped, found)


def _with_cuts(point: PointResult, cuts: tuple[Death, ...]) -> PointResult:
    return PointResult(point.shape, point.store, point.policy, point.kills, cuts, point.expected)
