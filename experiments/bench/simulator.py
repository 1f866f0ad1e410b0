"""Speed and memory of the simulator, from the start of the interpreter to its end: each case is a `testbed run` in its
own process that writes the records of every request and step.

The main case is one on which other simulators were measured: the first 10,000 rows of the Azure 2023 conversation trace
(or generated requests that resemble them), arrivals scaled to 1,250 s, Llama-3.1-8B on one H100, 27,800 KV blocks of 16
tokens, 512 sequences, token budget 512, chunked prefill, prefix caching. Further cases: the same with Qwen3-0.6B, which
takes many short steps; the same without the compiled core; a long generated trace that is streamed, not held in memory;
and the points of a sweep, one after the other in one process.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from experiments.console import Parser
from sim.cost.base import CostModel
from testbed.checks import require_whole
from testbed.core.plan import BatchShape, PrefillChunk
from testbed.errors import ConfigError, TestbedError

NUM_ROWS, RATE = 10_000, 8
POINT_REQUESTS = 2_000
SETTINGS = (
    "device=h100", "scheduler=vllm_v1", "scheduler.max_num_seqs=512",
    "scheduler.max_num_batched_tokens=512", "cache.num_gpu_blocks=27800", "cache.block_size=16",
)  # fmt: skip
# lengths as in the trace (P50 and P90: 1,020 and 2,734 tokens in, 129 and 424 out), arrivals slightly bursty
LOOK_ALIKE = (
    "trace=synthetic", "trace.arrival=gamma", "trace.cv=1.09", "trace.rate=8",
    "trace.prompt.value=1020", "trace.prompt.sigma=0.77", "trace.prompt.max_tokens=4142",
    "trace.output.value=129", "trace.output.sigma=0.93", "trace.output.max_tokens=601",
)  # fmt: skip


class Timing(NamedTuple):
    """One process: wall-clock time of all of it and of the serving loop only, in s; steps; peak resident MiB."""

    num_requests: int
    wall_s: float
    loop_s: float
    num_steps: int
    peak_mib: float
    digest: str


def main(arguments: list[str]) -> int:
    parser = Parser("testbed bench simulator", description=__doc__)
    parser.add_argument(
        "--trace", type=Path, help="the Azure 2023 conversation CSV; absent: requests that look like it"
    )
    parser.add_argument("--requests", type=int, default=1_000_000, help="of the long generated trace; 0: skip it")
    parser.add_argument("--rows", type=int, default=NUM_ROWS, help=f"of the trace, 2 or more ({NUM_ROWS})")
    parser.add_argument("--repeats", type=int, default=3, help="of the short cases; the best counts (3)")
    options = parser.parse_args(arguments)
    if options.trace is not None and not options.trace.is_file():
        raise ConfigError(f"--trace: no file {options.trace}; give the Azure 2023 conversation CSV, or leave it out")
    require_whole("--rows", options.rows, 2)
    require_whole("--repeats", options.repeats, 1)
    require_whole("--requests", options.requests, 0)
    num_rows = options.rows
    rows = [*LOOK_ALIKE, f"trace.num_requests={num_rows}"]
    if options.trace is not None:
        rows = ["trace=azure", f"trace.path={options.trace.absolute()}", f"trace.limit={num_rows}"]
    short = [*rows, f"trace.transforms=[{{name: set_rate, rate: {RATE}, by: warp}}]"]
    source = "Azure 2023" if options.trace is not None else "Azure-like"
    print("simulator: `testbed run`, Llama-3.1-8B on an H100, vllm_v1, budget 512, 512 sequences, 27,800 blocks")
    print(f"  {'case':<38}{'requests/s':>11}{'steps/s':>11}{'steps':>12}{'loop s':>8}{'wall s':>8}{'peak MiB':>10}")
    case = f"{source}, {num_rows:,}"
    _bench("start-up: 1 request", ["trace.num_requests=1"], options.repeats)
    compiled = _bench(case, short, options.repeats)
    _bench(f"{case}, requests alone", [*short, "record.steps=false"], options.repeats)
    _bench(f"{case}, Qwen3-0.6B", [*short, "model=qwen3_0.6b"], options.repeats)
    if find_spec("aiconfigurator_core") is not None:
        _bench(f"{case}, cost=tables", [*short, "cost=tables"], options.repeats)
    interpreted = _bench(f"{case}, interpreted", short, 1, {"TESTBED_COMPILED": "0"})
    if interpreted.digest != compiled.digest or interpreted.num_steps != compiled.num_steps:
        raise TestbedError(
            f"the compiled core decided otherwise: digests {compiled.digest} and {interpreted.digest}; please report it"
        )
    if options.requests > 0:
        long = [*LOOK_ALIKE, f"trace.num_requests={options.requests}", "record.token_times=false"]
        _bench(f"generated, {options.requests:,}", long, 1)
    _bench_points(options.repeats)
    _bench_prices(options.repeats)
    return 0


def _bench_points(repeats: int) -> None:
    """Times runs in this process, as the points of a sweep run. Only the first one also pays for imports."""
    from experiments.configuration.compose import compose_config
    from experiments.runs.run import execute

    overrides = ["model=llama3.1_8b", *SETTINGS, *LOOK_ALIKE, f"trace.num_requests={POINT_REQUESTS}"]
    timed = []
    with tempfile.TemporaryDirectory(prefix="testbed-bench-") as scratch:
        for seed in range(2 + repeats):
            began = time.perf_counter()
            config = compose_config([*overrides, f"seed={seed}"])
            composed_s = time.perf_counter() - began
            run = execute(config, Path(scratch, str(seed)))
            timed.append((time.perf_counter() - began, run.manifest["wall_s"], composed_s))
    point_s, loop_s, composed_s = min(timed[1:])
    print(
        f"  a point of a sweep, {POINT_REQUESTS:,} Azure-like requests in one process: {point_s:.3f} s, of which the "
        f"loop {loop_s:.3f} and composing the configuration {composed_s:.3f} (the first one: {timed[0][0]:.3f})"
    )


def _bench_prices(repeats: int) -> None:
    """Prints the CPU time that each cost model needs per step. `calibrated` is fitted to the roofline's step times."""
    from experiments.configuration.compose import compose_config
    from experiments.wiring.costs import build_cost
    from sim.cost.calibrated import CalibratedCost
    from sim.cost.calibration import calibrate
    from testbed.specs.profiles import Profile, ProfileManifest, number_repeats

    config = compose_config(["model=llama3.1_8b", "device=h100"])
    models: dict[str, CostModel] = {"roofline": build_cost(config)}
    shapes = {"decodes": _shapes(0), "mixed": _shapes(1)}
    priced = [(shape, models["roofline"].price(shape)) for of in shapes.values() for shape in of]
    steps = [(shape, spans, sum(spans)) for shape, spans in priced]
    manifest = ProfileManifest("h100", asdict(config.model), 16, "bfloat16")
    models["calibrated"] = CalibratedCost(calibrate(Profile(manifest, number_repeats(steps))))
    if find_spec("aiconfigurator_core") is not None:
        models["tables"] = build_cost(compose_config(["model=llama3.1_8b", "device=h100", "cost=tables"]))
    for kind, of in shapes.items():
        took = {name: [_price_s(model, of) for _ in range(1 + repeats)] for name, model in models.items()}
        said = ", ".join(f"{name} {1e6 * min(times[1:]):.2f}" for name, times in took.items())
        print(f"  the price of a step, {kind}, us: {said}")


def _shapes(num_prefills: int) -> list[BatchShape]:
    draw = random.Random(1)
    found = []
    for _ in range(2_000):
        num, context = draw.randrange(1, 200), draw.randrange(50, 3_000)
        chunks = tuple(PrefillChunk(draw.randrange(500), draw.randrange(16, 512)) for _ in range(num_prefills))
        found.append(BatchShape(num, num * context, chunks, num, longest_decode_context=context))
    return found


def _price_s(model: CostModel, shapes: list[BatchShape]) -> float:
    """Returns the CPU time of one call of `price`, in s."""
    began = time.process_time()
    for shape in shapes:
        model.price(shape)
    return (time.process_time() - began) / len(shapes)


def _bench(case: str, overrides: list[str], repeats: int, variables: dict[str, str] | None = None) -> Timing:
    """Prints and returns the best of the repeats: requests/s and steps/s over the wall-clock time of the whole process.
    variables: environment variables, added to those of this process."""
    one = min((_measure(overrides, variables or {}) for _ in range(repeats)), key=lambda one: one.wall_s)
    print(
        f"  {case:<38}{one.num_requests / one.wall_s:>11,.0f}{one.num_steps / one.wall_s:>11,.0f}{one.num_steps:>12,}"
        f"{one.loop_s:>8.2f}{one.wall_s:>8.2f}{one.peak_mib:>10,.0f}",
        flush=True,
    )
    return one


def _measure(overrides: list[str], variables: dict[str, str]) -> Timing:
    """Measures one run in its own process. If it fails, raises TestbedError with the last line of its error output."""
    with tempfile.TemporaryDirectory(prefix="testbed-bench-") as scratch:
        folder = Path(scratch) / "run"
        model = [] if any(one.startswith("model=") for one in overrides) else ["model=llama3.1_8b"]
        command = [sys.executable, "-m", "experiments", "run", *model, *SETTINGS, *overrides, f"hydra.run.dir={folder}"]
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | variables
        )
        assert process.stderr is not None
        said = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            last = (said.strip().splitlines() or [f"{' '.join(command[1:])}: exit status {process.returncode}"])[-1]
            raise TestbedError(last.removeprefix("error: "))
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    peak_mib = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return Timing(manifest["num_sent"], wall_s, manifest["wall_s"], manifest["num_steps"], peak_mib, manifest["digest"])
