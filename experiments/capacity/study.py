"""Runs the searches of all policies and seeds in rounds: the next rate of every search, then the verdicts.

Verdicts depend only on the points, and each point only on its configuration. So neither the number of jobs nor the
points that a folder already has change a result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor

from analysis.comparison.arms import find_arm
from analysis.load import flatten, require_path
from analysis.measures.capacity import Load, max_failed
from analysis.progress import progress
from analysis.reading.files import read_json
from analysis.reports.trust import Source
from experiments.capacity.arms import Arm, parse
from experiments.capacity.found import Capacity, Found, Replicate, mean_bracket
from experiments.capacity.points import point_name, read_point, run_point
from experiments.capacity.search import Ask, Bracket, beside, search
from experiments.configuration.compose import ONE_AT_A_TIME
from experiments.configuration.config import RunConfig
from experiments.runs.identity import Identity, edited_since_import, identity_of
from experiments.runs.run_folder import alone, write_json
from experiments.wiring.build import simulated_pools
from experiments.wiring.foreign import check_importable, named_classes
from testbed.checks import require, require_type, require_whole
from testbed.errors import ConfigError, DeviceError, RunFolderError, TestbedError
from testbed.foreign_text import number, shown

IDENTITY, POINTS, _LOCK = "search.json", "points", ".lock"
MIN_TOLERANCE, MAX_TOLERANCE = 0.001, 0.5


def find_capacity(
    *overrides: str, folder: str | os.PathLike[str], tolerance: float = 0.02, jobs: int = 1, whole: bool = False
) -> Capacity:
    """The highest rate at which each policy keeps its SLO, under each seed.

    overrides: as for `testbed capacity`: "scheduler=vllm_v1,sarathi", "slo.ttft_s=1", "seed=0,1". folder: stores every
    point; the same search continues there and simulates no point again. tolerance: relative distance of the bracket's
    ends. whole: no run is stopped early; the result is the same. Raises TestbedError with a message of one line.
    Threads take turns.
    """
    tolerance, jobs, whole = map(_plain, (tolerance, jobs, whole))
    is_good = number(MIN_TOLERANCE, MAX_TOLERANCE)(tolerance)
    require("tolerance", tolerance, is_good, f"from {MIN_TOLERANCE} to {MAX_TOLERANCE}")
    require_whole("jobs", jobs, 1)
    require_type("whole", whole, bool)
    target = require_path("folder", folder)
    if other := [one for one in overrides if not isinstance(one, str)]:
        raise ConfigError(f"find_capacity was given {shown(other[0])}; give overrides, as 'slo.ttft_s=1'")
    arms, seeds = parse(overrides)
    report = arms[0].raw["report"]
    base = find_arm(arms, report["baseline"])
    for arm in arms:
        check_importable(config := RunConfig.from_container(arm.raw))
        if edited := edited_since_import(config):
            raise ConfigError(edited)
    unfit = {arm.name: reason for arm in arms if (reason := _unfit(arm))}
    fitting = [arm for arm in arms if arm.name not in unfit]
    if not fitting:
        raise DeviceError(_whose(arms[0], arms) + unfit[arms[0].name])
    if target.exists() and not target.is_dir():
        raise RunFolderError(f"{target} is no folder; choose another folder")
    target.mkdir(parents=True, exist_ok=True)
    with alone(target / _LOCK, target, "folder"), ONE_AT_A_TIME:
        identity = _claim(target, arms, seeds)
        finest = {arm.name: min(tolerance, identity["tolerance"].get(arm.name, tolerance)) for arm in fitting}
        searches = [
            _Search(arm, seeds, finest[arm.name], target / POINTS, _whose(arm, arms), is_whole=whole) for arm in fitting
        ]
        with progress(f"capacity, {len(fitting)} searches", "point") as bar:
            try:
                _run(searches, jobs, bar)
            except KeyboardInterrupt:
                said = f"interrupted; the points that were done are kept in {target}: the same search goes on there"
                raise KeyboardInterrupt(said) from None
        write_json(target / IDENTITY, identity | {"tolerance": finest})
    found = tuple(one.found() for one in searches)
    points = pd.DataFrame([row for one in searches for row in one.rows()])
    baseline = (base if base in fitting else fitting[0]).name
    return Capacity(found, points, target, max(finest.values()), seeds, baseline, report["margin"], unfit)


def _whose(arm: Arm, arms: Sequence[Arm]) -> str:
    """The beginning of an error of one policy: its name, if there are others."""
    return f"{arm.name}: " if len(arms) > 1 else ""


def _unfit(arm: Arm) -> str:
    """Why the model and one KV block do not fit into the memory that is simulated; "" if they do."""
    config = RunConfig.from_container(arm.raw)
    if not config.is_simulated or config.recorded_run is not None:
        return ""
    try:
        simulated_pools(config)
    except DeviceError as error:
        return str(error)
    return ""


def _plain(value: Any) -> Any:
    """The number, also if it is NumPy's."""
    return value.item() if isinstance(value, np.generic) else value


def _claim(folder: Path, arms: Sequence[Arm], seeds: Sequence[int]) -> dict[str, Any]:
    """Writes the identity of the search into the folder, and returns it. Raises RunFolderError if the folder has
    another search, or policies that are missing here.

    A search may continue with more policies and seeds, as points are stored by the hash of their configuration. The
    tolerance of each policy is the finest one that was searched.
    """
    identity: dict[str, Any] = json.loads(json.dumps(_identity(arms, seeds)))
    policies, file = identity["policy"], folder / IDENTITY
    if file.exists():
        kept = read_json(file)
        names = {}  # here, as more values of a key may have changed it
        for name, policy in kept["policy"].items():
            names[name] = next((here for here, raw in policies.items() if raw == policy), None)
            if names[name] is None and name in policies:
                raise _another(folder, _difference(name, policy, policies[name]))
        if not set(kept["seed"]) <= set(seeds):
            raise _another(folder, f"seed is {kept['seed']!r} there and {[*seeds]!r} here")
        if missing := [name for name, here in names.items() if here is None]:
            raise RunFolderError(
                f"{folder} holds the search of {', '.join(missing)} too, which its tables would lose; name all "
                "policies, or choose another folder"
            )
        for name, here in names.items():
            now, before = Identity(**identity["made_from"][here]), {"identity": kept["made_from"][name]}
            if not now.is_of(before):
                raise _another(folder, now.changes_since(before))
        finest = kept.get("tolerance", {})
        identity["tolerance"] = {here: finest[name] for name, here in names.items() if name in finest}
    elif any(path.name != _LOCK for path in folder.iterdir()):
        raise RunFolderError(f"{folder} is not empty and holds no search; choose another folder")
    write_json(file, identity)
    return identity


def _another(folder: Path, why: str) -> RunFolderError:
    return RunFolderError(f"{folder} holds another search: {why}; choose another folder, or repeat that one")


def _difference(name: str, there: dict[str, Any], here: dict[str, Any]) -> str:
    """A text on the first key in which two configurations of a policy differ."""
    before, now = flatten(there), flatten(here)
    key = next(key for key in {**before, **now} if before.get(key) != now.get(key))
    return f"{key} of {name} is {before.get(key)!r} there and {now.get(key)!r} here"


def _identity(arms: Sequence[Arm], seeds: Sequence[int]) -> dict[str, Any]:
    """Everything that determines a point except its rate."""
    return {
        "seed": list(seeds),
        "policy": {arm.name: {k: v for k, v in arm.raw.items() if k not in ("report", "seed")} for arm in arms},
        "made_from": {arm.name: asdict(identity_of(RunConfig.from_container(arm.at(arm.start, 0)))) for arm in arms},
        "tolerance": {},
    }


def _run(searches: Sequence[_Search], jobs: int, bar: Any) -> None:
    in_parallel = jobs if all(one.arm.is_simulated for one in searches) else 1  # an engine must not share the machine
    if in_parallel > 1 and any([*named_classes(one.arm.raw)] for one in searches):
        get_reusable_executor().shutdown()  # its workers, of an earlier call, hold the user's classes as they were then
    try:
        with (
            TemporaryDirectory(prefix="testbed-capacity-") as scratch,
            Parallel(n_jobs=in_parallel, return_as="generator_unordered") as parallel,
        ):
            while asking := [one for one in searches if one.asks]:
                for _ in parallel(point for one in asking for point in one.missing(scratch)):
                    bar.update()
                for one in asking:
                    one.go_on()
    except BrokenProcessPool:
        raise TestbedError(
            "a simulation's process was killed, perhaps for want of memory; the points that were done are kept: "
            "repeat it in the same folder, with fewer jobs"
        ) from None


def _run_point(whose: str, *point: Any) -> None:
    try:
        run_point(*point)
    except TestbedError as error:
        raise type(error)(f"{whose}{error}") from None


class _Search:
    """The search for one policy, a bisection for each seed: the rates to try next (`asks`; none: the search has ended),
    each with the index of its seed, and the earlier results."""

    def __init__(
        self, arm: Arm, seeds: Sequence[int], tolerance: float, folder: Path, whose: str, *, is_whole: bool
    ) -> None:
        self.arm, self._seeds, self._folder, self._whose, self._is_whole = arm, seeds, folder, whose, is_whole
        self._rates = [search(arm.start, tolerance) for _ in seeds]
        self.asks = [(index, next(rates)) for index, rates in enumerate(self._rates)]
        self._brackets: dict[int, Bracket] = {}  # of the seeds whose bisection has ended
        self._tried: list[dict[float, Load]] = [{} for _ in seeds]
        self._notes: dict[str, str] = {}  # by how they begin: some count the steps of their point
        self._sources: dict[Source, None] = {}
        self._has_looked_beside = False

    def _point(self, index: int, ask: Ask) -> tuple[dict[str, Any], Path, int | None]:
        """The configuration of a point, its file, and how many requests may fail."""
        arm, raw = self.arm, self.arm.at(ask.value, self._seeds[index])
        most = None if ask.is_whole or self._is_whole else max_failed(arm.num_requests[index], arm.share)
        return raw, self._folder / f"{point_name(raw)}.json", most

    def missing(self, scratch: str) -> Iterator[Any]:
        """The calls that run the points which the folder does not have."""
        arm = self.arm
        for index, ask in self.asks:
            raw, file, most = self._point(index, ask)
            if read_point(file, most) is None:
                num = arm.num_requests[index]
                yield delayed(_run_point)(self._whose, raw, arm.slo, most, file, num, arm.is_of_sessions, scratch)

    def go_on(self) -> None:
        """Sends each bisection the verdict on the rate that was tried, and gets the next rates."""
        asks = []
        for index, ask in self.asks:
            _, file, most = self._point(index, ask)
            load = read_point(file, most)
            assert load is not None, file
            stored = read_json(file)
            for note in stored["notes"]:
                self._notes.setdefault(note.partition(":")[0], note)
            if stored["source"] is not None:
                self._sources[Source(*stored["source"])] = None
            kept = load.keeps(self.arm.share)
            if kept is None:  # the trace has another length at this rate: stopped too early
                asks.append((index, Ask(ask.value, True)))
                continue
            self._tried[index][ask.value] = load
            if index in self._brackets:
                continue
            try:
                asks.append((index, self._rates[index].send(kept)))
            except StopIteration as ended:
                self._brackets[index] = ended.value
        if not asks and not self._has_looked_beside:
            self._has_looked_beside, asks = True, self._beside()
        self.asks = asks

    def _beside(self) -> list[tuple[int, Ask]]:
        """The capacity, under each seed; to its end, the failing rate of a seed that keeps none. If simulated, that of
        each seed, and rates beside."""
        bracket = mean_bracket([self._brackets[index] for index in range(len(self._seeds))])
        whole = self.arm.is_simulated
        common = [*([] if bracket.kept is None else [Ask(bracket.kept, True)]), *(beside(bracket) if whole else [])]
        asks = [
            (index, Ask(one.failed, True))
            for index, one in self._brackets.items()
            if one.failed is not None and (whole or one.kept is None)
        ]
        return list(dict.fromkeys(asks + [(index, ask) for ask in common for index in range(len(self._seeds))]))

    def found(self) -> Found:
        tried = [tuple(sorted(loads.items())) for loads in self._tried]
        each = [Replicate(seed, self._brackets[i], tried[i]) for i, seed in enumerate(self._seeds)]
        return Found(self.arm, tuple(each), tuple(self._notes.values()), tuple(self._sources))

    def rows(self) -> Iterator[dict[str, Any]]:
        arm = self.arm
        for value in sorted(set().union(*self._tried)):
            for seed, loads in zip(self._seeds, self._tried, strict=True):
                if (load := loads.get(value)) is not None:
                    point = {"policy": arm.name, "rate": value * arm.per_value, "unit": arm.unit, "seed": seed}
                    yield point | {arm.rate_key: value, "kept": load.keeps(arm.share)} | load.as_row()
