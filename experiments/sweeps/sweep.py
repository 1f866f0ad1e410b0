"""`testbed run -m`: finds the points of a sweep, skips finished ones, and runs the others through Hydra's launcher.

Hydra composes, parses and launches. Each of its jobs runs many points (experiments/sweeps/points.py), because Hydra
takes longer to compose a small point than it takes to simulate it.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import sleep
from typing import Any, cast

from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from xxhash import xxh3_128_hexdigest

from experiments.configuration.compose import compose_raw
from experiments.configuration.config import GROUPS, JUDGING, RunConfig
from experiments.configuration.grammar import parsed
from experiments.configuration.on_device import check_device, slow_engine, unlike_clocks
from experiments.configuration.options import Library
from experiments.configuration.overrides import check, combinations, file_of_swept, searched, swept_values
from experiments.configuration.saved import read_manifest
from experiments.console import from_here
from experiments.runs.identity import identity_of
from experiments.runs.origin import Origin, end_of_others, restate
from experiments.runs.replacing import put_back
from experiments.runs.run import FailedError
from experiments.runs.run_folder import is_locked, named_folder, refuse_run, writing
from experiments.sweeps.points import (
    JobConfigs,
    Known,
    Outcome,
    Point,
    Share,
    board_in,
    is_done,
    say_killed,
    say_not_begun,
)
from experiments.sweeps.progress import Followed
from experiments.wiring.build import check_makeable
from experiments.wiring.costs import fit_file
from experiments.wiring.foreign import check_importable
from experiments.wiring.own_reports import check_reports
from experiments.wiring.traces import check_trace
from testbed.checks import require_whole_or_null
from testbed.errors import ConfigError, TestbedError
from testbed.wording import count

_EVERY_S = 0.2  # interval of checks whether another process has finished a point
_MAX_TOLD = 40  # reasons against points, a line for each
_FEW = 3  # up to this many points are listed by name


def run_sweep(context: HydraContext, config: DictConfig, arguments: list[str]) -> None:
    """Runs the points of a sweep. arguments: overrides of the run's keys. config: Hydra's configuration of the sweep.

    Raises TestbedError with a one-line message, and KeyboardInterrupt.
    """
    if config.hydra.callbacks or config.hydra.job.chdir:
        raise ConfigError("hydra.callbacks and hydra.job.chdir act on jobs, which run many points each: leave them out")
    of_hydra: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
    if any(parsed(item).key_or_group in ("hydra.run", "hydra.run.dir") for item in of_hydra):
        raise ConfigError("this is a sweep: name its folder with hydra.sweep.dir instead of hydra.run.dir")
    into: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    if into["subdir"] != ".":
        raise ConfigError(
            "hydra.sweep.subdir: a point's folder is named by what the point is, so that no other run passes for it; "
            "leave it out (docs/sweeps.md)"
        )
    root = named_folder("hydra.sweep.dir", config.hydra.sweep.dir).absolute()
    overrides = [*searched(of_hydra), *arguments]
    with file_of_swept(overrides):
        keys = check(overrides, is_sweep=True)
        choices = _choices([*map(parsed, arguments)], keys.library)
        command = _command(of_hydra, choices, str(config.hydra.sweep.dir))
        named = [(" ".join(swept), own) for swept, own in combinations(choices, keys)]
        sweep = _Sweep(config, context, of_hydra, command, named, root)
        points = _points(sweep)
    _say_unknown_baseline([config for _, config in points])
    todo, before = _left_to_run(sweep, points)
    configs = [config for _, config in points if todo]
    for said in dict.fromkeys([*unlike_clocks(configs), *(said for one in configs for said in slow_engine(one))]):
        print(f"note         {said}", flush=True)
    with writing(root):
        outcomes = _launched(sweep, todo) if todo else []
        _conclude(sweep, [*before, *outcomes], len(todo) - len(outcomes))


@dataclass(frozen=True, slots=True)
class _Sweep:
    """A sweep. combinations: (label, overrides) of each point; the label is the swept overrides. of_hydra: overrides
    of Hydra's own keys. command: repeats the sweep."""

    master: DictConfig
    context: HydraContext
    of_hydra: list[str]
    command: str
    combinations: list[tuple[str, list[str]]]
    root: Path


# --- what to run ---


def _choices(parsed: list[Override], library: Library) -> dict[str, list[str]]:
    """Returns, by key, one override for each of its values."""
    choices: dict[str, list[str]] = {}
    for item in parsed:
        key = item.get_key_element().lstrip("+")
        choices[key] = list(dict.fromkeys(swept_values(item, library)))
        if key == "experiment" and len(choices[key]) > 1:
            raise ConfigError(f"{item.input_line}: an overlay brings keys to sweep along; run one experiment at a time")
        if len(choices[key]) > 1 and key.partition(".")[0] in JUDGING:
            raise ConfigError(
                f"{key} decides nothing of a run, so its values are not swept: give one, and repeat the command with "
                "the next; finished runs are then judged by it, not run again"
            )
    return choices


def _command(of_hydra: list[str], choices: dict[str, list[str]], root: str) -> str:
    """Returns the command that repeats the sweep in the same folder."""
    of_keys = [",".join([first, *(one.partition("=")[2] for one in more)]) for first, *more in choices.values()]
    return shlex.join(["testbed", "run", "-m", *searched(of_hydra), *of_keys, f"hydra.sweep.dir={root}"])


def _points(sweep: _Sweep) -> list[tuple[Point, RunConfig]]:
    """Returns every point with its configuration. Raises FailedError, before any point runs, if one is invalid."""
    points: list[tuple[Point, RunConfig]] = []
    alike: dict[str, str] = {}  # labels by the hash of the configuration
    refused: list[Outcome] = []
    values: dict[str, set[str]] = {}
    made: set[str] = set()  # what was already constructed: each is tried once
    for item in (item for _, overrides in sweep.combinations for item in overrides):
        values.setdefault(item.partition("=")[0], set()).add(item)
    folders = searched(sweep.of_hydra)
    for number, (label, overrides) in enumerate(sweep.combinations):
        raw = compose_raw([*folders, *overrides])
        if (other := alike.setdefault(xxh3_128_hexdigest(repr(raw).encode()), label)) != label:
            raise ConfigError(
                f"{other} and {label} are one run: equal, or another setting has the last word; leave it out"
            )
        command = shlex.join(["testbed", "run", *folders, *overrides])
        try:
            config = RunConfig.from_container(raw)
            check_device(overrides, config)
            check_importable(config)
            check_trace(config)
            fit_file(config)  # raises if no fit comes with the testbed
            chosen = repr([raw[group] for group in GROUPS if group not in ("trace", "record", *JUDGING)])
            if chosen not in made:
                check_makeable(config)
                check_reports(config)
                made.add(chosen)
            swept = [item for item in overrides if len(values[item.partition("=")[0]]) > 1]
            origin = Origin.of_point(overrides, sweep.command, swept, number)
            points.append((Point(label, command, raw, str(sweep.root), origin), config))
        except TestbedError as error:
            refused.append(Outcome(label, "failed", message=str(error), exit_status=error.exit_status))
    if refused:
        each = list({one.message: one for one in reversed(refused)}.values())[::-1]  # reason, with its first point
        raise _failure(each, f"({len(refused)} of {len(sweep.combinations)} points are refused, and none was run)")
    return points


def _say_unknown_baseline(configs: Sequence[RunConfig]) -> None:
    """Prints a note if report.baseline names no arm of these points, or several; earlier points in the folder may
    match. A single arm has no name that a user could know: arms are named by what differs between them."""
    baseline = configs[0].report.baseline
    if baseline is None:
        return
    from analysis.comparison.arms import arms_called, infer_arms  # not at the top: Arrow is slow to import
    from analysis.load import Run

    arms = infer_arms([Run(Path(f"point-{number}"), config.raw, {}) for number, config in enumerate(configs)])
    near = arms_called(arms, baseline)
    if len(arms) > 1 and len(near) != 1:
        what = f"{len(near)} arms of these points are" if near else "no arm of these points is"
        names = "; ".join(arm.name for arm in near or arms)
        print(f"note         report.baseline is {baseline!r}, and {what}: {names}")


def _left_to_run(sweep: _Sweep, points: list[tuple[Point, RunConfig]]) -> tuple[list[Point], list[Outcome]]:
    """Returns the points that are not finished, and the outcomes of finished ones that count as failed (requests could
    never fit). Moves aside the runs in the places of the former. Prints what it found."""
    refuse_run(sweep.root, "hydra.sweep.dir")
    for board in say_killed(sweep.root):
        shutil.rmtree(board, ignore_errors=True)
    known = Known(sweep.root)
    todo: dict[Path, Point] = {}
    done: dict[Path, Point] = {}
    aside: list[tuple[str, Path]] = []
    failed: list[Outcome] = []
    num_restated = 0
    for point, config in points:
        identity = identity_of(config)
        put_back(folder := point.place(identity))
        if not config.overwrite and is_done(folder, identity):
            done[folder] = point
            if not config.allow_ignored and (said := read_manifest(folder).get("ignored")):
                failed.append(Outcome(point.label, "failed", str(folder), said, exit_status=1))
            num_restated += restate(folder, config, point.command, point.origin)
            continue
        aside += [] if config.overwrite else known.make_room(folder, identity, point.origin, config.raw)
        todo[folder] = point
    after = end_of_others(sweep.root, {*done, *todo})
    for folder, point in done.items() if after == 0 else ():
        point.origin.state(folder, point.command)
    _say_found(len(points), list(done), aside, num_restated)
    return [replace(point, origin=point.origin.moved(after)) for point in todo.values()], failed


def _say_found(num_points: int, done: list[Path], aside: list[tuple[str, Path]], num_restated: int) -> None:
    for why, num in Counter(why for why, _ in aside).items():
        places = [place for reason, place in aside if reason == why]
        where = from_here(places[0].parent) if num > _FEW else ", ".join(map(from_here, places))
        print(f"set aside    {count(num, 'point')} ({why}): {where}")
    if done:
        names = f": {', '.join(map(from_here, done))}" if len(done) <= _FEW else ""
        print(f"done before  {len(done)} of {num_points} points{names}")
    if num_restated:
        print(f"restated     {num_restated} of them: {' and '.join(JUDGING)} as they are given now")


# --- running ---


def _launched(sweep: _Sweep, todo: list[Point]) -> list[Outcome]:
    """Runs the points through Hydra's launcher; returns their outcomes. Raises FailedError if the launcher fails."""
    num_jobs, limit = _jobs(sweep.master, len(todo), todo[0].raw["points_per_job"])
    failure: Exception | None = None
    returns: Iterable[JobReturn] = ()
    with board_in(sweep.root) as board, Followed(board, len(todo)) as followed:
        board.write(todo)
        share = Share(str(board.folder), limit, os.getcwd(), os.getpid())
        try:
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=HydraContext(cast(Any, JobConfigs(str(sweep.root))), sweep.context.callbacks),
                task_function=share,
                config=sweep.master,
            )
            returns = launcher.launch([[]] * num_jobs, initial_job_idx=0)
        except KeyboardInterrupt:
            followed.stop()
            raise _interrupted(todo, followed) from None
        except Exception as error:  # noqa: BLE001  a launcher may raise anything when a worker dies
            failure = error
    for item in returns:
        _ = item.return_value  # raises a job's exception: a bug, as all other failures are outcomes on the board
    if any(outcome.status == "interrupted" for outcome in followed.outcomes):
        raise _interrupted(todo, followed)
    if failure is not None:
        _say_not_begun(todo, followed, "the sweep ended without it")
        name = str(sweep.master.hydra.launcher["_target_"]).rpartition(".")[2]
        said = " ".join(str(failure).split(". ")[0].split()) or type(failure).__name__
        left = f"{len(todo) - followed.num_done} of {len(todo)} are left"
        raise FailedError(f"{name}: {said}; finished points stay, {left}: the same command runs them")
    return list(_settled(followed.outcomes))


def _settled(outcomes: list[Outcome]) -> Iterator[Outcome]:
    """Yields the outcomes; for a point that another process is running, waits for its result there."""
    for outcome in outcomes:
        folder = Path(outcome.folder)
        if outcome.status != "elsewhere":
            yield outcome
            continue
        while is_locked(folder):
            sleep(_EVERY_S)
        if (folder / "done").exists():
            yield replace(outcome, status="complete")
        else:
            message = f"another process began {folder} and did not finish it; the same command runs it"
            yield replace(outcome, status="failed", message=message)


def _say_not_begun(todo: list[Point], followed: Followed, why: str) -> None:
    """Records a failure in the folders of points without an outcome, so that reports list them as missing."""
    heard = {outcome.label for outcome in followed.outcomes}
    for point in todo:
        if point.label not in heard:
            say_not_begun(point, why)


def _interrupted(todo: list[Point], followed: Followed) -> KeyboardInterrupt:
    _say_not_begun(todo, followed, "interrupted before it began")
    num_left = len(todo) - followed.num_done
    left = "1 point is" if num_left == 1 else f"{num_left} points are"
    return KeyboardInterrupt(f"interrupted; finished points stay, {left} left: the same command runs them")


def _jobs(master: DictConfig, num_points: int, per_job: int | None) -> tuple[int, int | None]:
    """Returns the number of jobs for the launcher, and the limit of points for each (None: no limit)."""
    if per_job is not None:
        require_whole_or_null("points_per_job", per_job, 1)
        return -(-num_points // per_job), per_job
    launcher = str(master.hydra.launcher["_target_"])
    if launcher.endswith(".BasicLauncher"):
        return 1, None
    if launcher.endswith(".JoblibLauncher"):
        from joblib import effective_n_jobs

        try:
            return min(num_points, effective_n_jobs(master.hydra.launcher.n_jobs)), None
        except ValueError:
            raise ConfigError(
                f"hydra.launcher.n_jobs is {master.hydra.launcher.n_jobs}; it must be a number of processes, or -1 for "
                "as many as there are cores"
            ) from None
    return num_points, 1  # on a cluster, a job's time and memory limits are meant for one point


def _conclude(sweep: _Sweep, outcomes: list[Outcome], num_left: int) -> None:
    """Prints the notes and the result of the sweep. Raises FailedError if a point failed or was never taken."""
    from analysis.measures.notes import Note, told  # not at the top: Arrow is slow to import

    for note, where, num, rank in told((one.label, Note(*note)) for one in outcomes for note in one.notes):
        print(f"note         {count(num, 'point')}{f', the {rank} {where}' if rank else ''}: {note}")
    bad = [outcome for outcome in outcomes if outcome.status == "failed"]
    total = len(sweep.combinations)
    if bad:
        raise _failure(bad[:1], f"({len(bad)} of {total} points failed)" * (len(bad) > 1))
    if num_left:
        raise FailedError(f"{num_left} of {total} points were not run; the same command runs them")
    print(f"complete     {count(total, 'point')}: {from_here(sweep.root)}")


def _failure(bad: list[Outcome], how_many: str) -> FailedError:
    """Returns an error with the messages of failed points, a line for each."""
    lines = [f"{one.label}: " * bool(one.label) + one.message for one in bad[:_MAX_TOLD]]
    lines += [f"… and {len(bad) - _MAX_TOLD} more"] if len(bad) > _MAX_TOLD else []
    return FailedError("\n".join(lines) + f" {how_many}".rstrip(), bad[0].exit_status or 1)
