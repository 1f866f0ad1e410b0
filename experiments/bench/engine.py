"""How fast the real engine is: step times against the device's own ceilings, and whole runs against transformers.

On a CPU: a model of about 20 million parameters against `transformers.generate`, the same prompts, the same threads, in
turns. On a GPU: decode and prefill steps of published shapes with random weights, and 256 requests of 100 to 1,024
tokens in and out against transformers' continuous batching, with every attention provider that can run.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from experiments.bench import check_at_least
from experiments.bench import engine_steps as steps
from real.config import RealConfig
from real.replay import HostTimes
from testbed.errors import ConfigError, TestbedError
from testbed.specs.model import ModelSpec

SMALL = ModelSpec(
    name="20m", hidden_size=512, intermediate_size=1024, num_hidden_layers=5, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, vocab_size=16384, max_position_embeddings=4096, rope_theta=10_000.0,
    dtype="float32",
)  # fmt: skip
SHAPES = ("qwen3_0.6b", "qwen3_8b")
BATCHES, CONTEXT = (1, 8, 64, 256), 1024
PROMPTS = (512, 2048, 8192)
CPU_LOAD = (16, 128)  # requests, tokens in and as many out
SERVED, SERVED_TOKENS = 64, 128  # of the run that says what the host costs


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("testbed bench engine", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--parts", default="decode,prefill,offline", help="comma-separated, of decode, prefill, offline"
    )
    parser.add_argument("--models", default=None, help="on a GPU: names of the model group (qwen3_0.6b,qwen3_8b)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the whole runs, in turns (3)")
    parser.add_argument("--threads", type=int, default=None, help="of torch on the CPU; left out: torch's choice")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    for part in parts:
        if part not in ("decode", "prefill", "offline"):
            raise ConfigError(f"--parts names {part!r}; choose of decode, prefill, offline")
    check_at_least(1, repeats=options.repeats)
    try:
        import torch

        from real.device import describe_device, resolve_device
    except ModuleNotFoundError as error:
        raise ConfigError(f"this benchmark needs the package {error.name!r}: pip install '.[real]'") from None
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    print(f"engine: {describe_device(device)}, torch {torch.__version__}", flush=True)
    specs = (
        [SMALL] if device.type == "cpu" else [_spec(name) for name in (options.models or ",".join(SHAPES)).split(",")]
    )
    if {"decode", "prefill"} & set(parts):
        _step_tables(specs, device, parts)
    if "offline" in parts:
        if device.type == "cpu":
            _against_generate(SMALL, options.repeats)
        else:
            _against_continuous_batching(specs[0], options.repeats)
    return 0


def _spec(name: str) -> ModelSpec:
    from experiments.compose import compose_config

    return compose_config([f"model={name}"]).model


# --- steps ---


def _step_tables(specs: list[ModelSpec], device: Any, parts: list[str]) -> None:
    import torch

    is_cuda = device.type == "cuda"
    ceilings = steps.measure_ceilings(device, torch.bfloat16 if is_cuda else torch.float32)
    rates = f"{ceilings.bytes_per_s / 1e9:,.0f} GB/s copied, {ceilings.flops_per_s / 1e12:,.2f} TFLOP/s"
    print(f"  ceilings, measured: {rates}")
    context = CONTEXT if is_cuda else 256
    num_steps = 30 if is_cuda else 5
    prompts = [length for length in PROMPTS if is_cuda or length <= 2048]
    for spec in specs:
        num_blocks = max(max(BATCHES) * -(-context // steps.BLOCK_SIZE), -(-max(prompts) // steps.BLOCK_SIZE)) + 1
        backend = steps.build_engine(spec, device.type, "auto", num_blocks, max(max(BATCHES), *prompts))
        size = f"{spec.num_parameters / 1e9:.2f} B parameters, {spec.dtype}"
        print(f"\n  {spec.name}, {size}, attention {backend.attention_name}")
        print(f"  {'step':<34}{'ms':>9}{'device ms':>11}{'floor ms':>10}{'of floor':>10}{'host':>7}")
        if "decode" in parts:
            for batch in BATCHES:
                floor_s = steps.decode_floor_s(spec, batch, context, ceilings.bytes_per_s)
                taken = steps.decode_time(backend, spec, batch, context, num_steps)
                _show_step(f"decode, batch {batch}, context {context}", taken, floor_s)
        if "prefill" in parts:
            for length in prompts:
                floor_s = steps.prefill_floor_s(spec, length, ceilings.flops_per_s)
                taken = steps.prefill_time(backend, spec, length, max(3, num_steps // 3))
                _show_step(f"prefill, {length} tokens", taken, floor_s)
        backend.close()
        del backend
        if is_cuda:
            _free_gpu()


def _show_step(name: str, taken: steps.StepTime, floor_s: float) -> None:
    print(
        f"  {name:<34}{taken.total_s * 1e3:>9.3f}{taken.device_s * 1e3:>11.3f}{floor_s * 1e3:>10.3f}"
        f"{floor_s / taken.total_s:>10.0%}{taken.host_share:>7.1%}",
        flush=True,
    )


# --- whole runs ---


def _against_generate(spec: ModelSpec, repeats: int) -> None:
    """Prompts of one length, greedy: the same tokens must come out of both."""
    import torch
    from transformers import AutoModelForCausalLM

    from real.checkpoint import make_checkpoint

    num_requests, length = CPU_LOAD
    rng = random.Random(0)
    prompts = [[rng.randrange(spec.vocab_size) for _ in range(length)] for _ in range(num_requests)]
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "model", spec, seed=1)
        reference: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # in eval mode
        engine = Offline(path, [f"backend.num_threads={torch.get_num_threads()}", "backend.device=cpu"])
        inputs = torch.tensor(prompts)

        def generate() -> list[list[int]]:
            with torch.inference_mode():
                output = reference.generate(
                    inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=length, min_new_tokens=length,
                    do_sample=False, pad_token_id=0,
                )  # fmt: skip
            tokens: list[list[int]] = output[:, length:].tolist()
            return tokens

        arms = {
            "transformers.generate": generate,
            "this engine": lambda: engine.generate(prompts, [length] * num_requests),
        }
        size = f"{spec.num_parameters / 1e6:.1f} M parameters, {spec.dtype}"
        print(f"\n  {size}, {num_requests} x ({length} in + {length} out), in turns")
        outputs = _compare(arms, [length] * num_requests, repeats)
        engine.show_host(f"this engine, {num_requests} at a time")
        engine.close()
    same = sum(ours == theirs for ours, theirs in zip(*outputs.values(), strict=True))
    print(f"  {same} of {num_requests} outputs are the same token for token")


def _against_continuous_batching(spec: ModelSpec, repeats: int) -> None:
    """256 requests of 100 to 1,024 tokens in and out, all there at once: each provider that can run, and transformers.

    Each has the GPU to itself, one after the other; its model, cache and graphs are made, and one run is over, before
    the clock starts.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(spec.vocab_size) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    lengths = [rng.randint(100, 1024) for _ in prompts]
    print(f"\n  {spec.name}, {spec.dtype}, 256 requests, 100 to 1,024 tokens in and out: {sum(lengths):,} tokens")
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        from real.checkpoint import make_checkpoint

        path = make_checkpoint(Path(folder) / "model", spec, seed=1)
        rates |= _rates_of_transformers(path, spec, prompts, lengths, repeats)
        _free_gpu()
        for attention in ("flash_attn", "triton", "torch"):
            name = f"this engine, {attention}"
            try:
                engine = Offline(path, [f"backend.attention={attention}", "scheduler.max_num_seqs=256"])
            except TestbedError as error:
                print(f"  {name:<36}{error}")
                continue
            rates |= _rates({name: partial(engine.generate, prompts, lengths)}, lengths, repeats)[0]
            engine.generate(prompts[:SERVED], [SERVED_TOKENS] * SERVED)
            engine.show_host(f"{name}, {SERVED} at a time")
            engine.close()
            del engine
            _free_gpu()
    _show_rates(rates)


def _rates_of_transformers(
    path: Path, spec: ModelSpec, prompts: list[list[int]], lengths: list[int], repeats: int
) -> dict[str, list[float]]:
    """Its model and cache, most of the GPU, are nobody's any more when this returns."""
    with Transformers(path, spec.dtype, max(lengths)) as theirs:
        arms = {"transformers, continuous batching": lambda: theirs.generate(prompts, lengths)}
        return _rates(arms, lengths, repeats)[0]


def _free_gpu() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


class Transformers:
    """transformers' own scheduler and paged cache over the same checkpoint, kept from run to run."""

    def __init__(self, path: Path, dtype: str, max_new_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        config: Any = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=max_new_tokens)
        self._context = model.continuous_batching_context_manager(generation_config=config)

    def __enter__(self) -> Transformers:
        self._manager = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Each request with its own limit. Raises TestbedError if one fails."""
        manager: Any = self._manager
        outputs: dict[str, list[int]] = {}
        ids: list[str] = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
        while len(outputs) < len(ids):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise TestbedError("transformers' continuous batching stopped before it was done; see its log")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise TestbedError(f"transformers' continuous batching failed: {result.error}")
                outputs[result.request_id] = result.generated_tokens
        return [outputs[i] for i in ids]


def _compare(arms: dict[str, Any], lengths: list[int], repeats: int) -> dict[str, Any]:
    """Runs the arms in turns and shows them; the outputs of each."""
    rates, outputs = _rates(arms, lengths, repeats)
    _show_rates(rates)
    return outputs


def _rates(
    arms: dict[str, Any], lengths: list[int], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """Tokens/s of each arm in each of its turns, after one that is not measured; and the outputs of that."""
    outputs = {name: run() for name, run in arms.items()}
    for name, output in outputs.items():
        if [len(tokens) for tokens in output] != lengths:
            raise TestbedError(f"{name} did not give every request the tokens that it asked for; nothing to compare")
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, run in arms.items():
            began = time.perf_counter()
            run()
            rates[name].append(sum(lengths) / (time.perf_counter() - began))
    return rates, outputs


def _show_rates(rates: dict[str, list[float]]) -> None:
    """Median, range, and how many times the median of the first."""
    first = statistics.median(next(iter(rates.values())))
    for name, found in rates.items():
        spread, median = f"({min(found):,.0f} to {max(found):,.0f})", statistics.median(found)
        print(f"  {name:<36}{median:>9,.0f} tokens/s {spread:<20}{median / first:>6.2f}x", flush=True)


class Offline:
    """The engine under the core, over and over: prompts in, token ids out. No text, no records."""

    def __init__(self, path: Path, overrides: list[str]) -> None:
        from experiments import build
        from experiments.compose import compose_config

        self._build = build
        self._config = compose_config(
            ["backend=real", "scheduler=vllm_v1", "cache.prefix_caching=false", f"model.path={path}", *overrides]
        )
        self._backend = build.build_real_backend(self._config)
        settings = self._config.backend
        assert isinstance(settings, RealConfig)
        self._settings = settings
        self.host = HostTimes()  # of the last run

    def close(self) -> None:
        self._backend.close()

    def show_host(self, name: str) -> None:
        """The share of the last run's steps in which the device did nothing for them: scheduling, inputs, hand-over."""
        share = self.host.describe()["exposed_share"]
        print(f"  {name}: the host takes {share:.1%} of a step", flush=True)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        from real.driver import run
        from testbed.core.request import Request, SamplingParams
        from testbed.core.serve import serve

        pools = self._build.Pools(self._backend.num_gpu_blocks, self._backend.num_cpu_blocks)
        scheduler = self._build.build_scheduler(self._config, pools)
        inbox = _AllAtOnce(
            [
                Request(str(i), prompt, sampling=SamplingParams(max_tokens=length, ignore_eos=True))
                for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            ]
        )
        self.host = HostTimes()
        run(serve(inbox, scheduler, _NoRecords()), self._backend, self._settings, log=self.host)
        return [inbox.outputs[str(i)] for i in range(len(prompts))]


class _AllAtOnce:
    """An inbox whose requests are all there at the start."""

    is_open = False

    def __init__(self, requests: list[Any]) -> None:
        self._requests = requests
        self.outputs: dict[str, list[int]] = {}

    def next_ns(self) -> int | None:
        return 0 if self._requests else None

    def due(self, now_ns: int) -> list[Any]:
        from testbed.core.commands import Arrive

        due, self._requests = [Arrive(request) for request in self._requests], []
        return due

    def finished(self, requests: list[Any], now_ns: int) -> None:
        for finished in requests:
            self.outputs[finished.request.request_id] = list(finished.output_token_ids)


class _NoRecords:
    """A recorder that keeps nothing."""

    def arrived(self, request: Any, now_ns: int, step: int) -> None: ...
    def aborted(self, request_id: str, now_ns: int, step: int) -> None: ...
    def committed(self, step: Any) -> None: ...
    def ended(self, finished: list[Any], now_ns: int) -> None: ...
