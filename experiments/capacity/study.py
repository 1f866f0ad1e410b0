"""Runs the searches of all policies in rounds: the next rate of every search under every seed, then the verdicts.

Verdicts depend only on the points, and each point only on its configuration. So neither the number of jobs nor the
points that a folder already has change a result.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from joblib import Parallel, delayed
from tqdm import tqdm

from analysis.load import flatten, require_path
from analysis.measures.capacity import Load, max_failed, pooled
from analysis.reading.files import read_json
from experiments.capacity.arms import Arm, parse
from experiments.capacity.points import point_name, read_point, run_point
from experiments.capacity.search import Ask, Bracket, search
from experiments.configuration.config import JUDGING, RunConfig
from experiments.runs.identity import identity_of
from experiments.runs.run_folder import write_json
from experiments.wiring.foreign import check_importable
from testbed.checks import require, require_whole
from testbed.errors import RunFolderError, TestbedError

IDENTITY, POINTS = "search.json", "points"
MIN_TOLERANCE, MAX_TOLERANCE = 0.001, 0.5


@dataclass(frozen=True)
class Found:
    """The result of the search for one policy. tried: all rates, ascending, with the counts pooled over the seeds."""

    arm: Arm
    bracket: Bracket
    tried: tuple[tuple[float, Load], ...]  # values of the arm's rate key
    notes: tuple[str, ...] = ()  # from its cost model

    def rate(self, value: float | None) -> float | None:
        return None if value is None else value * self.arm.per_value

    @property
    def capacity(self) -> float:
        """The highest rate of the search that keeps the SLO, in the arm's unit; 0 if none does."""
        return self.rate(self.bracket.kept) or 0.0

    @property
    def at_kept(self) -> Load | None:
        return self._at(self.bracket.kept)

    @property
    def at_failed(self) -> Load | None:
        return self._at(self.bracket.failed)

    def _at(self, value: float | None) -> Load | None:
        return next((load for tried, load in self.tried if tried == value), None)

    def extreme(self, *, kept: bool) -> float | None:
        """Of all rates tried, the highest that keeps the SLO, or the lowest that fails; None if there is none."""
        values = [value for value, load in self.tried if bool(load.keeps(self.arm.share)) is kept]
        return self.rate(values[-1 if kept else 0]) if values else None


@dataclass(frozen=True)
class Capacity:
    """The results of all policies. points: one row per policy, rate and seed. tolerance: of the coarsest search."""

    found: tuple[Found, ...]
    points: pd.DataFrame
    folder: Path
    tolerance: float
    seeds: tuple[int, ...]


def find_capacity(
    *overrides: str, folder: str | os.PathLike[str], tolerance: float = 0.02, jobs: int = 1, whole: bool = False
) -> Capacity:
    """The highest rate at which each policy keeps its SLO.

    overrides: as for `testbed capacity`: "scheduler=vllm_v1,sarathi", "slo.ttft_s=1", "seed=0,1". folder: stores every
    point; the same search continues there and simulates no point again. tolerance: relative distance of the bracket's
    ends. whole: no run is stopped early; the result is the same. Raises TestbedError with a message of one line.
    """
    is_good = MIN_TOLERANCE <= tolerance <= MAX_TOLERANCE
    require("tolerance", tolerance, is_good, f"from {MIN_TOLERANCE} to {MAX_TOLERANCE}")
    require_whole("jobs", jobs, 1)
    target = require_path("folder", folder)
    arms, seeds = parse(overrides)
    identity = _claim(target, arms, seeds)
    finest = {arm.name: min(tolerance, identity["tolerance"].get(arm.name, tolerance)) for arm in arms}
    searches = [_Search(arm, seeds, finest[arm.name], target / POINTS, is_whole=whole) for arm in arms]
    with tqdm(desc=f"capacity of {len(arms)}", unit="point", leave=False, disable=None) as bar:
        _run(searches, jobs, bar)
    write_json(target / IDENTITY, identity | {"tolerance": finest})
    found = tuple(one.found() for one in searches)
    points = pd.DataFrame([row for one in searches for row in one.rows()])
    return Capacity(found, points, target, max(finest.values()), seeds)


def _claim(folder: Path, arms: Sequence[Arm], seeds: Sequence[int]) -> dict[str, Any]:
    """Writes the identity of the search into the folder, and returns it. Raises RunFolderError if the folder has
    another search, or policies that are missing here.

    A search may continue with more policies and seeds, as points are stored by the hash of their configuration. The
    tolerance of each policy is the finest one that was searched under these seeds.
    """
    for arm in arms:
        check_importable(RunConfig.from_container(arm.raw))
    identity: dict[str, Any] = json.loads(json.dumps(_identity(arms, seeds)))
    file = folder / IDENTITY
    if file.exists():
        kept = read_json(file)
        names = {name: _name_here(kept, identity, name) for name in kept["policy"]}
        if (differing := _differing(kept, identity, names)) is not None:
            raise RunFolderError(
                f"{folder} holds another search: {differing}; choose another --out, or repeat that one"
            )
        if missing := [name for name, here in names.items() if here is None]:
            raise RunFolderError(
                f"{folder} holds the search of {', '.join(missing)} too, which its tables would lose; name all "
                "policies, or choose another --out"
            )
        finest = kept.get("tolerance", {}) if kept["seed"] == identity["seed"] else {}
        identity["tolerance"] = {here: finest[name] for name, here in names.items() if name in finest}
    elif folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise RunFolderError(f"{folder} is not empty and holds no search; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, identity)
    return identity


def _name_here(kept: dict[str, Any], identity: dict[str, Any], name: str) -> str | None:
    """The current name of a policy in the folder; None if missing. More values of a key may have changed the name."""
    if name in identity["policy"]:
        return name
    same = (here for here, raw in identity["policy"].items() if raw == kept["policy"][name])
    return next((here for here in same if identity["slo"][here] == kept["slo"][name]), None)


def _differing(kept: dict[str, Any], identity: dict[str, Any], names: dict[str, str | None]) -> str | None:
    """A text on the first input of the folder's points that is different now; None if all are the same."""
    for part in ("slo", "policy", "the file", "the class file"):
        for name in kept[part]:
            there, here = kept[part][name], identity[part].get(names.get(name) or name)
            if there != here and not (part in ("slo", "policy") and names[name] is None):
                if part not in ("slo", "policy"):
                    return f"{part} {name} has changed since"
                before, now = (flatten({"slo": value} if part == "slo" else value) for value in (there, here))
                key = next(key for key in {**before, **now} if before.get(key) != now.get(key))
                return f"{key} of {name} is {before.get(key)!r} there and {now.get(key)!r} here"
    for part in ("seed", "the testbed's code"):
        there, here = kept[part], identity[part]
        if there != here and not (part == "seed" and set(there) <= set(here)):
            return f"{part} is {there!r} there and {here!r} here"
    return None


def _identity(arms: Sequence[Arm], seeds: Sequence[int]) -> dict[str, Any]:
    """Everything that determines a point except its rate; keys that users know come first."""
    made_from = [identity_of(RunConfig.from_container(arm.raw)) for arm in arms]
    return {
        "slo": {arm.name: arm.raw["slo"] for arm in arms},
        "seed": list(seeds),
        "policy": {arm.name: {k: v for k, v in arm.raw.items() if k not in (*JUDGING, "seed")} for arm in arms},
        "the file": {name: digest for one in made_from for name, digest in one.files.items()},
        "the class file": {name: digest for one in made_from for name, digest in one.classes.items()},
        "the testbed's code": made_from[0].code,
        "tolerance": {},
    }


def _run(searches: Sequence[_Search], jobs: int, bar: Any) -> None:
    """Runs all searches to their ends."""
    in_parallel = jobs if all(one.arm.is_simulated for one in searches) else 1  # an engine must not share the machine
    try:
        with (
            TemporaryDirectory(prefix="testbed-capacity-") as scratch,
            Parallel(n_jobs=in_parallel, return_as="generator_unordered") as parallel,
        ):
            while asking := [one for one in searches if one.ask is not None]:
                for _ in parallel(point for one in asking for point in one.missing(scratch)):
                    bar.update()
                for one in asking:
                    one.go_on()
    except BrokenProcessPool:
        raise TestbedError(
            "a simulation's process was killed, perhaps for want of memory; the points that were done are kept: "
            "repeat the command with the same --out, and fewer --jobs"
        ) from None


class _Search:
    """The search for one policy: the rate to try next (`ask`; None: the search has ended), and the earlier results."""

    def __init__(self, arm: Arm, seeds: Sequence[int], tolerance: float, folder: Path, *, is_whole: bool) -> None:
        self.arm, self._seeds, self._folder, self._is_whole = arm, seeds, folder, is_whole
        self._rates = search(arm.start, tolerance, looks_beside=arm.is_simulated)
        self.ask: Ask | None = next(self._rates)
        self._bracket = Bracket(None, None)  # set when the search has ended
        self._tried: dict[float, list[Load]] = {}  # rate -> one load for each seed
        self._notes: dict[str, None] = {}

    def _points(self) -> Iterator[tuple[dict[str, Any], Path, int | None]]:
        """For each seed at the next rate: the configuration, its file, and how many requests may fail."""
        assert self.ask is not None
        arm, is_whole = self.arm, self.ask.is_whole or self._is_whole
        most = None if is_whole else max_failed(sum(arm.num_requests), arm.share)
        for seed in self._seeds:
            raw = arm.at(self.ask.value, seed)
            yield raw, self._folder / f"{point_name(raw)}.json", most

    def missing(self, scratch: str) -> Iterator[Any]:
        """The calls that run the points which the folder does not have."""
        arm = self.arm
        for (raw, file, most), num in zip(self._points(), arm.num_requests, strict=True):
            if read_point(file, most) is None:
                yield delayed(run_point)(raw, arm.slo, most, file, num, arm.is_of_sessions, scratch)

    def go_on(self) -> None:
        """Sends the search the verdict on the rate that was tried, and gets the next rate."""
        assert self.ask is not None
        loads = []
        for _, file, most in self._points():
            load = read_point(file, most)
            assert load is not None, file
            loads.append(load)
            self._notes |= dict.fromkeys(read_json(file)["notes"])
        kept = pooled(loads).keeps(self.arm.share)
        if kept is None:  # traces differ in length at this rate: stopped too early
            self.ask = Ask(self.ask.value, True)
            return
        self._tried[self.ask.value] = loads
        try:
            self.ask = self._rates.send(kept)
        except StopIteration as ended:
            self.ask, self._bracket = None, ended.value

    def found(self) -> Found:
        tried = [(value, pooled(loads)) for value, loads in sorted(self._tried.items())]
        return Found(self.arm, self._bracket, tuple(tried), tuple(self._notes))

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows of the table of points."""
        arm = self.arm
        for value, loads in sorted(self._tried.items()):
            kept = pooled(loads).keeps(arm.share)
            for seed, load in zip(self._seeds, loads, strict=True):
                point = {"policy": arm.name, "rate": value * arm.per_value, "unit": arm.unit, "seed": seed}
                yield point | {arm.rate_key: value, "kept": kept} | load.as_row()
