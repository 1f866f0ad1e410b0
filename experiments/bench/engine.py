"""How fast the real engine is: step times against the device's own ceilings, and whole runs beside other engines.

On a CPU: a model of about 20 million parameters beside `transformers.generate`, transformers' continuous batching and,
in an environment that has it, vLLM's CPU build: the same checkpoint, prompts and threads, in turns. On a GPU: steps of
published shapes with random weights, and 256 requests of 100 to 1,024 tokens in and out beside the same, with
every attention provider that can run.
"""

from __future__ import annotations

import gc
from typing import Any

from experiments.bench import engine_steps as steps
from experiments.bench import offline
from experiments.console.arguments import Parser
from experiments.tables.devices import model_spec
from testbed.checks import choose, require_whole
from testbed.errors import ConfigError
from testbed.specs.model import ModelSpec

SMALL = ModelSpec(
    name="20m", hidden_size=512, intermediate_size=1024, num_hidden_layers=5, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, vocab_size=16384, max_position_embeddings=4096, rope_theta=10_000.0,
    dtype="float32",
)  # fmt: skip
SHAPES = ("qwen3_0.6b", "qwen3_8b")
BATCHES, CONTEXT = (1, 8, 64, 256), 1024
PROMPTS = (512, 2048, 8192)


def main(arguments: list[str]) -> int:
    parser = Parser("testbed bench engine", description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--parts", default="decode,prefill,offline", help="comma-separated, of decode, prefill, offline"
    )
    parser.add_argument("--models", default=None, help="on a GPU: names of the model group (qwen3_0.6b,qwen3_8b)")
    parser.add_argument(
        "--dtypes", default="float32,bfloat16", help="on a CPU: comma-separated, of float32, bfloat16 (both)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the whole runs, in turns (3)")
    parser.add_argument("--threads", type=int, default=None, help="of torch on the CPU; left out: torch's choice")
    options = parser.parse_args(arguments)
    parts, dtypes = options.parts.split(","), options.dtypes.split(",")
    for dtype in dtypes:
        choose("--dtypes", dtype, offline.CPU_DTYPES)
    for part in parts:
        choose("--parts", part, ("decode", "prefill", "offline"))
    require_whole("--repeats", options.repeats, 1)
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
        [SMALL]
        if device.type == "cpu"
        else [model_spec(name) for name in (options.models or ",".join(SHAPES)).split(",")]
    )
    if {"decode", "prefill"} & set(parts):
        _step_tables(specs, device, parts)
    if "offline" in parts:
        if device.type == "cpu":
            offline.on_cpu(SMALL, options.repeats, options.threads or torch.get_num_threads(), dtypes)
        else:
            offline.on_gpu(specs[0], options.repeats)
    return 0


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
        backend = steps.build_engine(spec, device.type, num_blocks, max(max(BATCHES), *prompts))
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
            gc.collect()
            torch.cuda.empty_cache()


def _show_step(name: str, taken: steps.StepTime, floor_s: float) -> None:
    print(
        f"  {name:<34}{taken.total_s * 1e3:>9.3f}{taken.device_s * 1e3:>11.3f}{floor_s * 1e3:>10.3f}"
        f"{floor_s / taken.total_s:>10.0%}{taken.host_share:>7.1%}",
        flush=True,
    )
