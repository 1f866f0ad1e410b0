"""The command line of `testbed capacity`: what is printed and written."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import time
from pathlib import Path

from experiments.capacity.study import Capacity, find_capacity
from experiments.capacity.words import policy_table, setup_lines, summary_frame, warnings, without_capacity
from experiments.configuration.overrides import refuse_repeated
from experiments.console import Parser, folder_named
from experiments.runs.environment import describe_versions
from experiments.runs.run_folder import write_json
from testbed.errors import TestbedError

RESULT, TEXT, FIGURE, TABLE = "capacity.json", "capacity.md", "capacity", "points.csv"


class NoCapacityError(TestbedError):
    """A policy's capacity is 0, or beyond what its trace can show."""


def main(arguments: list[str]) -> int:
    options = _parser().parse_intermixed_args(arguments)
    refuse_repeated(options.overrides)
    folder: Path = options.out or Path("capacity", time.strftime("%Y-%m-%d"), time.strftime("%H-%M-%S"))
    if any(re.match(r"\+*backend=(?!sim$)", item) for item in options.overrides):
        print("note: an engine runs each of some ten rates in its own time, one after the other", file=sys.stderr)
    try:
        found = find_capacity(
            *options.overrides, folder=folder, tolerance=options.tolerance, jobs=options.jobs, whole=options.whole
        )
    except KeyboardInterrupt:
        words = [word for word in arguments if word != str(options.out) and not word.startswith("--out")]
        again = shlex.join(["testbed", "capacity", *words, "--out", str(folder)])
        raise KeyboardInterrupt(f"interrupted; the points that were done are kept, go on with: {again}") from None
    said = [f"note: {sentence}" for one in found.found for sentence in warnings(one)]
    lines = [*setup_lines(found), "", policy_table(found), *(["", *said] if said else [])]
    if found.tolerance < options.tolerance:
        lines.append(f"note: {folder} has the brackets of --tolerance {found.tolerance:g}, finer than asked for")
    _write(found, lines, shlex.join(["testbed", "capacity", *arguments]))
    print("\n".join(lines))
    print(f"\nwrote {folder / TEXT}, {FIGURE}.png, {TABLE}")
    missing = [reason for one in found.found if (reason := without_capacity(one))]
    if missing:
        raise NoCapacityError(missing[0] + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "testbed capacity",
        description="The highest request rate at which each policy keeps its SLO (docs/capacity.md).",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value",
        help="as of `testbed run`; several values (scheduler=a,b) are policies, of seed replicates; slo.ttft_s, "
        "slo.tpot_s, slo.e2e_s, slo.itl_max_s: the limits, slo.attainment (0.99): who must keep them; trace.rate (or "
        "trace.rate_scale): where to start",
    )  # fmt: skip
    parser.add_argument("--tolerance", type=float, default=0.02, help="how close the rates kept and failed are (0.02)")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once (1)")
    parser.add_argument("--whole", action="store_true", help="stop no simulation early; the capacities are the same")
    parser.add_argument(
        "--out", type=folder_named, help="folder; one of the same search goes on (capacity/<date>/<time>)"
    )
    return parser


def _write(found: Capacity, lines: list[str], command: str) -> None:
    from analysis.plots.capacity_plots import rate_curves
    from analysis.plots.style import save

    out, frame = found.folder, summary_frame(found)
    policies = json.loads(frame.to_json(orient="records"))
    result = {
        "tolerance": found.tolerance,
        "seeds": list(found.seeds),
        "version": describe_versions()["llm-serving-testbed"],
        "policies": policies,
    }
    write_json(out / RESULT, result)
    found.points.to_csv(out / TABLE, index=False)
    (out / TEXT).write_text(
        f"# Capacity\n\n`{command}`\n\n" + "\n".join(lines) + f"\n\n![goodput and attainment]({FIGURE}.png)\n",
        encoding="utf-8",
    )
    units = " or ".join(dict.fromkeys(one.arm.unit for one in found.found))
    curves = {
        one.arm.name: [(value * one.arm.per_value, load) for value, load in one.tried if load.is_whole]
        for one in found.found
    }
    capacities = {one.arm.name: one.capacity for one in found.found}
    save(rate_curves(curves, capacities, {one.arm.share for one in found.found}, units), out / FIGURE)
