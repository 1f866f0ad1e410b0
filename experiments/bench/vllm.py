"""`testbed bench vllm`: vLLM twice, this testbed's simulator, and its scheduler inside vLLM, on the same traces.

Run it in vLLM's environment (docs/vllm.md). A random model of a few layers is served on the CPU with one thread. The
simulator's prices are fitted to observed runs of other traces. Every run is a process of its own; time is the process's
CPU time, as hosts are shared: what others do on the machine is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from analysis.fidelity import relative_error, summary_value
from analysis.load import Run, load_run
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
    "device=cpu", "model.dtype=float32", "cache.block_size=32", "cache.num_cpu_blocks=0", "scheduler.max_num_seqs=32",
    "scheduler.max_model_len=1024", "cache.prefix_caching=true", "trace.forced=lengths",
    "trace.prompt={kind:lognormal,value:160,sigma:0.8,min_tokens:8,max_tokens:600}",
    "trace.output={kind:lognormal,value:50,sigma:0.6,min_tokens:4,max_tokens:200}",
]  # fmt: skip
VLLM = ["backend=vllm", "backend.load_format=dummy", "backend.enforce_eager=true", "backend.pace=cpu_time"]
ENGINE = [
    "backend=real", "backend.device=cpu", "backend.load_format=dummy", "backend.num_threads=1",
    "backend.pace=cpu_time",
]  # fmt: skip
ROOMY, TIGHT = "cache.num_gpu_blocks=600", "cache.num_gpu_blocks=60"
POLICIES = {
    "vllm_v1": ["scheduler=vllm_v1", "scheduler.max_num_batched_tokens=512"],
    "sarathi, 128 tokens": ["scheduler=sarathi", "scheduler.max_num_batched_tokens=128"],
    "prefill_first": ["scheduler=prefill_first", "scheduler.max_num_batched_tokens=1024"],
    "vllm_v1, sjf": ["scheduler=vllm_v1", "scheduler.max_num_batched_tokens=512", "scheduler.queue_order=sjf"],
}


class Bench:
    """Runs into one folder; a run that is there already is not repeated."""

    def __init__(self, folder: Path, num_requests: int) -> None:
        self.folder, self._num_requests = folder, num_requests
        self.model = folder / "model"
        self.model.mkdir(parents=True, exist_ok=True)
        (self.model / "config.json").write_text(json.dumps(MODEL))

    def run(self, name: str, *settings: str) -> Run:
        folder = self.folder / name
        if not (folder / "done").exists():
            command = [
                sys.executable, "-m", "experiments", "run", f"model.path={self.model}", *SHARED,
                f"trace.num_requests={self._num_requests}", *settings, f"hydra.run.dir={folder}", "overwrite=true",
            ]  # fmt: skip
            environment = {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
            }  # fmt: skip
            done = subprocess.run(command, env=environment | os.environ, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = [line for line in (done.stdout + done.stderr).splitlines() if "rror" in line]
                raise TestbedError(f"{name} failed: {reason[-1] if reason else f'exit status {done.returncode}'}")
        return load_run(folder)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("testbed bench vllm", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=150, help="of each run (150)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-vllm"), help="folder of all runs; kept")
    parser.add_argument("--rates", type=float, nargs=2, help="requests/s at 60 and 90 %% of capacity (measured)")
    options = parser.parse_args(arguments)
    if options.requests < 20:
        raise ConfigError(f"--requests is {options.requests}; a P99 needs 20 at least")
    bench = Bench(options.out.absolute(), options.requests)
    rates = options.rates or _rates(bench)
    print(f"{rates[0]:.1f} and {rates[1]:.1f} requests/s are 60 and 90 % of capacity")
    fit = _fit(bench, rates)
    loads = {
        f"60 %, {rates[0]:.1f}/s": [f"trace.rate={rates[0]}", ROOMY],
        f"90 %, {rates[1]:.1f}/s": [f"trace.rate={rates[1]}", ROOMY],
        f"small pool, {rates[1]:.1f}/s": [f"trace.rate={rates[1]}", TIGHT],
    }
    for label, load in loads.items():
        _fidelity(bench, label, [*load, "trace.seed=7"], fit)
    _ablation(bench, [f"trace.rate={rates[1]}", TIGHT, "trace.seed=8"], fit)
    return 0


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _rates(bench: Bench) -> tuple[float, float]:
    """From a run in which everything comes at once."""
    run = bench.run(
        "capacity", *VLLM, "backend.decides=vllm", *POLICIES["vllm_v1"], ROOMY, "trace.seed=3",
        "trace.rate=1000",
    )  # fmt: skip
    capacity = float(run.summary["throughput"]["requests_per_s"])
    return round(0.6 * capacity, 1), round(0.9 * capacity, 1)


def _fit(bench: Bench, rates: Sequence[float]) -> Path:
    """Prices fitted to vLLM's own runs of other traces, light, heavy and all at once."""
    from sim.cost.calibration import calibrate
    from sim.cost.calibration_file import save_calibration
    from testbed.specs.profiles import Profile, number_repeats, read_profile

    profiles = []
    for seed, rate in ((101, rates[0] / 2), (102, rates[0]), (103, rates[1]), (104, 3 * rates[1])):
        run = bench.run(
            f"calibrate-{seed}", *VLLM, "backend.decides=vllm", *POLICIES["vllm_v1"], ROOMY, f"trace.rate={rate}",
            f"trace.seed={seed}",
        )  # fmt: skip
        profiles.append(read_profile(run.path / "profile.parquet"))
    steps = number_repeats((step.shape, step.spans, step.total_ns) for one in profiles for step in one.steps)
    path = bench.folder / "fit.json"
    save_calibration(calibrate(Profile(profiles[0].manifest, steps)), path)
    print(f"prices fitted to {len(steps):,} steps of vLLM on four other traces\n", flush=True)
    return path


def _sim(fit: Path) -> list[str]:
    return ["backend=sim", "cost=calibrated", f"cost.path={fit}"]


def _fidelity(bench: Bench, label: str, load: Sequence[str], fit: Path) -> None:
    """Signed errors against the mean of two runs of vLLM, beside the difference of these two."""
    name, preset = _slug(label), POLICIES["vllm_v1"]
    first, again = (bench.run(f"{name}-vllm-{i}", *VLLM, "backend.decides=vllm", *preset, *load) for i in (1, 2))
    others = {
        "simulator": bench.run(f"{name}-sim", *_sim(fit), *preset, *load),
        "ours in vLLM": bench.run(f"{name}-ours", *VLLM, *preset, *load),
        "our engine": bench.run(f"{name}-engine", *ENGINE, *preset, *load),
    }
    preempted = int(first.requests["num_preemptions"].sum())
    print(f"{label}: {preempted} preemptions in vLLM")
    print(f"| metric | vLLM | again | {' | '.join(others)} |\n|---|---|---|{'---|' * len(others)}")
    for path in METRICS:
        one, two = (summary_value(run.summary, path) or 0.0 for run in (first, again))
        cells = [f"{1e3 * one:.2f} ms", _percent(relative_error(two, one))]
        cells += [
            _percent(relative_error(summary_value(run.summary, path), (one + two) / 2)) for run in others.values()
        ]
        print(f"| {path.replace('_s.', ' ')} | {' | '.join(cells)} |")
    print(flush=True)


def _ablation(bench: Bench, load: Sequence[str], fit: Path) -> None:
    """Four policies in the simulator and, twice, in vLLM: who wins where vLLM tells the first two apart."""
    sims = {
        name: bench.run(f"ablate-{_slug(name)}-sim", *_sim(fit), *policy, *load) for name, policy in POLICIES.items()
    }
    reals = {
        name: [bench.run(f"ablate-{_slug(name)}-vllm-{i}", *VLLM, *policy, *load) for i in (1, 2)]
        for name, policy in POLICIES.items()
    }
    print("Four policies, ms in vLLM (simulated), means of two runs of vLLM")
    print(f"| metric | {' | '.join(POLICIES)} | same winner |")
    print(f"|---|{'---|' * len(POLICIES)}---|")
    for path in METRICS:
        found = {name: [summary_value(run.summary, path) or 0.0 for run in runs] for name, runs in reals.items()}
        means = {name: sum(values) / 2 for name, values in found.items()}
        said = {name: summary_value(run.summary, path) or 0.0 for name, run in sims.items()}
        best, winner = min(means, key=lambda name: means[name]), min(said, key=lambda name: said[name])
        noise = max(abs(a - b) / ((a + b) / 2 or 1.0) for a, b in found.values())
        (lead, second), *_ = pairwise(sorted(means.values()))
        is_told = (second - lead) / (lead or 1.0) > noise
        verdict = ("yes" if best == winner else f"no: {winner}") if is_told else "not told apart"
        cells = [f"{1e3 * means[name]:.2f} ({1e3 * said[name]:.2f})" for name in POLICIES]
        print(f"| {path.replace('_s.', ' ')} | {' | '.join(cells)} | {verdict} |")


def _percent(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:+.1f} %"
