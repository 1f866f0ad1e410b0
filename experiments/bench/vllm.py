"""`testbed bench vllm`: vLLM, this testbed's simulator, and its scheduler inside vLLM, on the same traces.

Run it in an environment with vLLM (docs/vllm.md). A random model of a few layers is served on the CPU with one thread.
The simulator's step times are fitted to observed runs of other traces. Every run has its own process. As hosts are
shared, time is scaled by a probe (backend.pace=probe_scaled): one step of vLLM for vLLM, one step of our engine for our
engine. Runs are made in rounds. In each round, the runs for the fit and the runs for the evaluation alternate. Before
the first round both backends run in turns. The mean time of each one's probe then becomes its reference
(backend.probe_ns) in all later runs, so that one second means the same for both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from analysis.load import Run, load_run
from analysis.measures.summary import summary_value
from analysis.reports.fidelity_findings import probe_of
from experiments.bench.offline import VLLM_VARIABLES
from experiments.console import Parser, percent, table
from experiments.fidelity.comparing import metric_name
from testbed.errors import ConfigError, TestbedError

METRICS = tuple(f"{name}.{of}" for name in ("ttft_s", "tpot_s", "e2e_s") for of in ("mean", "p50", "p99"))
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 32, "hidden_act": "silu", "hidden_size": 256, "initializer_range": 0.02, "intermediate_size": 768,
    "max_position_embeddings": 4096, "model_type": "qwen3", "num_attention_heads": 8, "num_hidden_layers": 6,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "float32", "use_sliding_window": False, "vocab_size": 4096,
}  # fmt: skip
SHARED = [
    "device=cpu", "cache.block_size=32", "cache.num_cpu_blocks=0", "scheduler.max_num_seqs=32",
    "scheduler.max_model_len=1024", "cache.prefix_caching=true", "trace.forced=lengths",
    "trace.prompt={kind:lognormal,value:160,sigma:0.8,min_tokens:8,max_tokens:600}",
    "trace.output={kind:lognormal,value:50,sigma:0.6,min_tokens:4,max_tokens:200}",
]  # fmt: skip
VLLM = ["backend=vllm", "backend.load_format=dummy", "backend.enforce_eager=true", "backend.pace=probe_scaled"]
ENGINE = [
    "backend=real", "backend.device=cpu", "backend.load_format=dummy", "backend.num_threads=1",
    "backend.pace=probe_scaled",
]  # fmt: skip
ROOMY, TIGHT = "cache.num_gpu_blocks=600", "cache.num_gpu_blocks=60"
POLICIES = {
    "vllm_v1": ["scheduler=vllm_v1", "scheduler.max_num_batched_tokens=512"],
    "sarathi, 128 tokens": ["scheduler=sarathi", "scheduler.max_num_batched_tokens=128"],
    "prefill_first": ["scheduler=prefill_first", "scheduler.max_num_batched_tokens=1024"],
    "vllm_v1, sjf": ["scheduler=vllm_v1", "scheduler.max_num_batched_tokens=512", "scheduler.queue_order=sjf"],
}
ALL_AT_ONCE = [*POLICIES["vllm_v1"], ROOMY, "trace.seed=3", "trace.rate=1000"]
BUDGETS = (512, 128, 1024)  # token budgets of the policies
YARDSTICK_RUNS = 4  # of each backend


class Bench:
    """Makes runs in one folder. A measured run that is already there is not repeated. fitted: the runs to which step
    times are fitted; of: those of the rounds, by load or policy."""

    def __init__(self, folder: Path, num_requests: int) -> None:
        self.folder, self._num_requests = folder, num_requests
        self.fitted: list[Run] = []
        self.of: defaultdict[str, list[Run]] = defaultdict(list)
        self.vllm, self.engine = VLLM, ENGINE  # settings; settle_probes adds the probe's reference time
        self.model = folder / "model"
        self.model.mkdir(parents=True, exist_ok=True)
        (self.model / "config.json").write_text(json.dumps(MODEL))

    def run(self, name: str, *settings: str) -> Run:
        name = "".join(letter if letter.isalnum() else "-" for letter in name)
        folder = self.folder / name
        if settings[0] == "backend=sim" or not (folder / "done").exists():  # simulations follow the latest fit
            command = [
                sys.executable, "-m", "experiments", "run", f"model.path={self.model}", *SHARED,
                f"trace.num_requests={self._num_requests}", *settings, f"hydra.run.dir={folder}", "overwrite=true",
            ]  # fmt: skip
            environment = VLLM_VARIABLES | {"OMP_NUM_THREADS": "1"} | os.environ
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line]
                raise TestbedError(f"{name} failed: {reason[-1] if reason else f'exit status {done.returncode}'}")
        run = load_run(folder)
        if not run.is_simulated and probe_of(run.manifest) is None:
            raise ConfigError(f"{folder} is of another backend.pace than probe_scaled; choose another --out")
        return run

    def settle_probes(self) -> None:
        """Runs both backends in turns to measure their probes, and sets the means as references of all later runs."""
        found: dict[str, list[int]] = {"vllm": [], "engine": []}
        for number in range(YARDSTICK_RUNS):
            for name, backend in (("vllm", VLLM), ("engine", ENGINE)):
                run = self.run(f"yardstick-{name}-{number}", *backend, *ALL_AT_ONCE)
                found[name].append(probe_of(run.manifest) or 0)
        means = {name: round(geometric_mean(probes)) for name, probes in found.items()}
        self.vllm = [*VLLM, f"backend.probe_ns={means['vllm']}"]
        self.engine = [*ENGINE, f"backend.probe_ns={means['engine']}"]
        for name, probes in found.items():
            shown = ", ".join(f"{one / 1e6:.2f}" for one in probes)
            print(f"{name}: a probe takes {means[name] / 1e6:.2f} ms ({shown})", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = Parser("testbed bench vllm", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=150, help="of each run (150)")
    parser.add_argument("--rounds", type=int, default=4, help="how often everything is run on vLLM (4)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-vllm"), help="folder of all runs; kept")
    parser.add_argument("--rates", type=float, nargs=2, help="requests/s at 60 and 90 %% of capacity (measured)")
    options = parser.parse_args(arguments)
    if options.requests < 20:
        raise ConfigError(f"--requests is {options.requests}; a P99 needs 20 at least")
    if options.rounds < 2:
        raise ConfigError(f"--rounds is {options.rounds}; vLLM's own noise needs 2 at least")
    bench = Bench(options.out.absolute(), options.requests)
    bench.settle_probes()
    rates = options.rates or _rates(bench)
    print(f"{rates[0]:.1f} and {rates[1]:.1f} requests/s are 60 and 90 % of capacity")
    loads = {
        f"60 %, {rates[0]:.1f}/s": [f"trace.rate={rates[0]}", ROOMY, "trace.seed=7"],
        f"90 %, {rates[1]:.1f}/s": [f"trace.rate={rates[1]}", ROOMY, "trace.seed=7"],
        f"small pool, {rates[1]:.1f}/s": [f"trace.rate={rates[1]}", TIGHT, "trace.seed=7"],
    }
    contest = [f"trace.rate={rates[1]}", TIGHT, "trace.seed=8"]
    for number in range(options.rounds):
        _round(bench, number, rates, loads, contest)
        print(f"round {number + 1} of {options.rounds} is done", flush=True)
    simulated = ["backend=sim", "cost=calibrated", f"cost.path={_fit(bench)}"]
    for label, load in loads.items():
        _fidelity(bench, label, load, simulated)
    _ablation(bench, contest, simulated)
    return 0


def _round(
    bench: Bench, number: int, rates: Sequence[float], loads: dict[str, list[str]], contest: Sequence[str]
) -> None:
    """Makes each run once. The runs for the fit (other traces, from light load to overload, with each policy's token
    budget) alternate with the runs for the evaluation."""
    observed, preset = [*bench.vllm, "backend.decides=vllm"], POLICIES["vllm_v1"]
    others = iter((rates[0] / 2, rates[0], rates[1], 3 * rates[1]))

    def fit_another() -> None:
        seed = 101 + len(bench.fitted)
        load = [f"trace.rate={next(others)}", f"trace.seed={seed}", ROOMY]
        budget = f"scheduler.max_num_batched_tokens={BUDGETS[seed % len(BUDGETS)]}"
        bench.fitted.append(bench.run(f"fitted-{seed}", *observed, "scheduler=vllm_v1", budget, *load))

    for label, load in loads.items():
        fit_another()
        bench.of[label].append(bench.run(f"{label}-vllm-{number}", *observed, *preset, *load))
        bench.of[f"{label}, ours"].append(bench.run(f"{label}-ours-{number}", *bench.vllm, *preset, *load))
        bench.of[f"{label}, engine"].append(bench.run(f"{label}-engine-{number}", *bench.engine, *preset, *load))
    fit_another()
    for name, policy in POLICIES.items():
        bench.of[name].append(bench.run(f"policy-{name}-{number}", *bench.vllm, *policy, *contest))


def _rates(bench: Bench) -> tuple[float, float]:
    """Returns 60 % and 90 % of the capacity, measured in a run whose requests arrive almost at once."""
    run = bench.run("capacity", *bench.vllm, "backend.decides=vllm", *ALL_AT_ONCE)
    capacity = float(run.summary["throughput"]["requests_per_s"])
    return round(0.6 * capacity, 1), round(0.9 * capacity, 1)


def _fit(bench: Bench) -> Path:
    """Fits step times to vLLM's own runs of other traces; returns the file."""
    from experiments.calibration.calibrate import PROFILE_FILE, together
    from sim.cost.calibration import calibrate
    from sim.cost.calibration_file import save_calibration
    from testbed.specs.profiles import read_profile

    profile = together(*(read_profile(run.path / PROFILE_FILE) for run in bench.fitted))
    path = bench.folder / "fit.json"
    save_calibration(calibrate(profile), path)
    print(f"prices fitted to {len(profile.steps):,} steps of vLLM on {len(bench.fitted)} other traces\n", flush=True)
    return path


def _fidelity(bench: Bench, label: str, load: Sequence[str], simulated: Sequence[str]) -> None:
    """Prints signed errors against the mean of vLLM's runs, and the range of vLLM's own runs around that mean."""
    preset, runs = POLICIES["vllm_v1"], bench.of[label]
    columns = {
        "simulator": [bench.run(f"{label}-sim", *simulated, *preset, *load)],
        "ours in vLLM": bench.of[f"{label}, ours"],
        "our engine": bench.of[f"{label}, engine"],
    }
    preempted = int(runs[0].requests["num_preemptions"].sum())
    print(f"\n{label}: {preempted} preemptions in vLLM; errors in %")
    rows = []
    for path in METRICS:
        truth, found = _mean(runs, path), _values(runs, path)
        low, high, *errors = (
            percent(value / truth - 1.0)
            for value in (min(found), max(found), *(_mean(of, path) for of in columns.values()))
        )
        rows.append([metric_name(path), f"{1e3 * truth:.2f}", f"{low} … {high}", *errors])
    print(table(["metric", "vLLM, ms", "its runs", *columns], rows), flush=True)


def _ablation(bench: Bench, load: Sequence[str], simulated: Sequence[str]) -> None:
    """Compares four policies in the simulator and in vLLM: whether both have the same winner, for each metric in which
    vLLM's best policy differs significantly from every other one."""
    sims = {name: bench.run(f"policy-{name}-sim", *simulated, *policy, *load) for name, policy in POLICIES.items()}
    print("\nFour policies, ms in vLLM (simulated)")
    rows = []
    for path in METRICS:
        means = {name: _mean(bench.of[name], path) for name in POLICIES}
        said = {name: _mean([run], path) for name, run in sims.items()}
        best, winner = min(means, key=lambda name: means[name]), min(said, key=lambda name: said[name])
        is_told = all(_is_told(bench.of[best], bench.of[name], path) for name in POLICIES if name != best)
        verdict = ("yes" if best == winner else f"no: {winner}") if is_told else "not told apart"
        cells = [f"{1e3 * means[name]:.2f} ({1e3 * said[name]:.2f})" for name in POLICIES]
        rows.append([metric_name(path), *cells, verdict])
    print(table(["metric", *POLICIES, "same winner"], rows))


def _is_told(lower: Sequence[Run], higher: Sequence[Run], path: str) -> bool:
    """Whether `lower` is significantly below `higher`: t-test on logarithms, paired by round, one-sided, at 5 %."""
    from scipy.stats import ttest_rel

    found = ttest_rel(np.log(_values(lower, path)), np.log(_values(higher, path)), alternative="less")
    return bool(found.pvalue < 0.05)


def _values(runs: Sequence[Run], path: str) -> list[float]:
    values = []
    for run in runs:
        value = summary_value(run.summary, path)
        if value is None:
            raise TestbedError(
                f"{run.path} has no {path}: its requests did not all get that far; remove the folder, and it is run "
                "again"
            )
        values.append(value)
    return values


def _mean(runs: Sequence[Run], path: str) -> float:
    return sum(_values(runs, path)) / len(runs)
