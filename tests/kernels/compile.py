"""Compiles the kernels that the engine launches, without a GPU, and tells what each takes of a multiprocessor.

    python -m tests.kernels.compile [--targets 80 90] [--filter PATTERN] [--markdown]

The public functions are called over the shapes that models have, and Triton's own binder specialises each launch;
nothing runs. One line a kernel: registers of a thread, bytes of local memory (spilled registers; 0 is what one wants),
bytes of shared memory of a program, warps of a program.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor

from real.attention.interface import AttentionSpec
from real.attention.triton_provider import is_interpreted
from tests.kernels.paged_batches import Batch, make_spec

if TYPE_CHECKING:
    from real.layers.matrix import Matrix

TARGETS = (80, 90)
FLAGS = {"IS_SPLIT": "split", "IS_MIXED": "mixed", "IS_FILTERED": "filtered"}  # constants that a kernel's name tells
Work = Callable[[], object]


class Usage(NamedTuple):
    """What a compiled kernel takes."""

    registers: int  # of a thread
    local_bytes: int  # of a thread: spilled registers, stack frame
    shared_bytes: int  # of a program
    num_warps: int


def on_no_gpu(patch: pytest.MonkeyPatch, target: int, launch: Callable[..., Any], device: str) -> None:
    """Has `launch(kernel, grid)` return what a kernel is called by, as for a GPU of this compute capability.

    device: the name under which Triton keeps what it compiled.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from real.kernels import chain, decode, few_tokens, formats, parts, prefill, weights

    stand_in = SimpleNamespace(
        get_current_device=lambda: device,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", target, 32),
    )
    patch.setattr(JITFunction, "__getitem__", launch)
    patch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", stand_in)
    for module in (chain, decode, few_tokens, formats, prefill, weights):
        patch.setattr(module, "capability", lambda device: divmod(target, 10))
    for counting in (parts, few_tokens):
        patch.setattr(counting, "num_processors", lambda device: 132)


def step(spec: AttentionSpec, rows: list[tuple[int, int]]) -> None:
    """Launches a step of rows (cached positions, new tokens); no kernel reads what its tensors hold."""
    from real.attention.triton_provider import TritonAttention

    batch = Batch(make_spec(1, 1, 1, spec.block_size, window=spec.sliding_window), rows, seed=1)
    num_tokens, num_blocks = len(batch.query), batch.kv_cache.shape[1]
    query = torch.empty(num_tokens, spec.num_heads, spec.head_dim, dtype=spec.dtype)
    key, value = torch.empty(2, num_tokens, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype)
    cache = torch.empty(2, num_blocks, spec.block_size, *key.shape[1:], dtype=spec.cache_dtype)
    TritonAttention(spec).prepare(batch.metadata)(query, key, value, cache)


def compiled(target: int, wanted: str) -> Iterator[tuple[str, Usage]]:
    """Every kernel in whose name and target, as in "move swap sm_80", the pattern is found. Raises what Triton raises
    where one does not compile."""
    of_name: dict[str, dict[str, Any]] = {}
    told: set[str] = set()
    found: list[tuple[str, Usage]] = []
    shape = ""

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **constants: Any) -> None:
            words = [*(word for name, word in FLAGS.items() if constants.get(name)), shape]
            kind = kernel.__name__.removesuffix("_kernel")
            name = " ".join([kind, *words])
            if of_name.setdefault(name, constants) != constants:  # those are of a step with longer rows
                name = " ".join([kind, "short", *words])
            if name not in told and re.search(wanted, f"{name} sm_{target}"):
                told.add(name)
                found.append((name, usage(kernel.run(*args, grid=grid, warmup=True, **constants))))

        return run

    with pytest.MonkeyPatch.context() as patch:
        on_no_gpu(patch, target, launch, f"to compile for {target}")
        for label, work in shapes():
            shape = label
            work()
            yield from found
            found.clear()


def shapes() -> Iterator[tuple[str, Work]]:
    """What the kernels are called with, each by a name."""
    for dtype, head_dim, group in product((torch.bfloat16, torch.float16), (64, 80, 128, 256), (1, 4, 8)):
        yield attention(dtype, head_dim, group)
    for head_dim, kv_dtype in product((64, 128), ("fp8_e4m3", "fp8_e5m2")):
        yield attention(torch.bfloat16, head_dim, 4, kv_dtype=kv_dtype)
    yield attention(torch.bfloat16, 128, 4, window=200)
    yield attention(torch.bfloat16, 128, 1, alibi=True)
    yield attention(torch.float32, 128, 4)
    for has_norm, dtype in product((True, False), (torch.bfloat16, torch.float8_e4m3fn)):
        yield heads(has_norm, dtype)
    yield "swap", lambda: move(2)
    yield "copy", lambda: move(56)
    yield "draw", draw
    for num_tokens, label in product((1, 64, 128), ("bf16", "bf16 e4m3", "bf16 e4m3 parts", "fp32")):
        yield experts(num_tokens, label)
    for num_tokens in (16, 32, 64):
        yield few_tokens(num_tokens, is_fp8=True)
    for num_tokens in (1, 32):
        yield few_tokens(num_tokens, is_fp8=False)
    yield "between GEMMs", between


def attention(dtype: torch.dtype, head_dim: int, group: int, **options: Any) -> tuple[str, Work]:
    """Decodes in one pass and split, alone and beside others; long prompts and short ones; of 8 KV heads."""
    words = [option.removeprefix("fp8_") if name == "kv_dtype" else name for name, option in options.items()]
    label = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    spec = make_spec(8, group, head_dim, 16, dtype, **options)

    def work() -> None:
        for rows in ([(20, 1)], [(500, 1)], [(20, 1), (0, 300)], [(500, 1), (0, 300)], [(0, 2)]):
            step(spec, rows)

    return " ".join([label, f"head {head_dim}", f"group {group}", *words]), work


def heads(has_norm: bool, cache_dtype: torch.dtype) -> tuple[str, Work]:
    """Of Qwen3 8B, with normalised heads, and of Llama 3.1 8B, without; KV memory in the model's format and as FP8."""

    def work() -> None:
        from real.kernels.heads import turn_and_store

        query, key, value = (torch.zeros(2, num, 128, dtype=torch.bfloat16) for num in (32, 8, 8))
        weight, angles = torch.zeros(128, dtype=torch.bfloat16), torch.zeros(2, 1, 64, dtype=torch.bfloat16)
        cache, slots = torch.zeros(2, 1, 16, 8, 128).to(cache_dtype), torch.arange(2)
        turn_and_store(query, key, value, (weight, weight, 1e-6) if has_norm else None, (angles, angles), cache, slots)

    return " ".join(["norm"] * has_norm + ["e4m3"] * (cache_dtype.itemsize == 1)) or "plain", work


def move(num_planes: int) -> None:
    """Blocks of 16 tokens, 8 KV heads of 128 numbers of 16 bits: of a layer that is swapped, of 28 that are copied."""
    from real.kernels.block_copy import move_blocks

    blocks = torch.zeros(num_planes, 2, 16, 8, 128, dtype=torch.bfloat16)
    move_blocks(blocks, blocks, torch.tensor([[0, 1]]))


def draw() -> None:
    """Sampling at the vocabulary of Qwen3, with filters and without."""
    from real.kernels.race import draw_tokens

    token_ids, logits, ones = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 151_936), torch.ones(2)
    for limits in (None, (ones, token_ids, ones)):
        draw_tokens(token_ids, token_ids, logits, token_ids, ones, token_ids, limits)


def experts(num_tokens: int, label: str, num: int = 8) -> tuple[str, Work]:
    """Some of Qwen3-30B-A3B's experts, of which eight are chosen and run. parts: a rank's columns begin within a block
    of weights that share a scale."""

    def work() -> None:
        from real.kernels.experts import run_experts
        from real.kernels.routing import choose
        from real.layers.matrix import Matrix

        dtype = torch.float32 if label == "fp32" else torch.bfloat16
        shares, chosen = choose(torch.zeros(num_tokens, num, dtype=dtype), 8, normalizes=True)

        def weight(rows: int, columns: int) -> Matrix:
            if "e4m3" not in label:
                return Matrix(torch.empty(num, rows, columns, dtype=dtype))
            return fp8(num, rows, columns, run=32 if "parts" in label else 128)

        run_experts(torch.zeros(num_tokens, 2048, dtype=dtype), shares, chosen, weight(1536, 2048), weight(2048, 768))

    return f"{label} experts, {8 * num_tokens} pairs", work


def few_tokens(num_tokens: int, is_fp8: bool) -> tuple[str, Work]:
    """Projections of Qwen3 8B, in parts and whole; in FP8 multiplied as they are stored, and dequantised."""

    def work() -> None:
        from real.kernels.few_tokens import can_multiply, multiply_few
        from real.kernels.weights import dequantized
        from real.layers.matrix import Matrix

        x = torch.zeros(num_tokens, 4096, dtype=torch.bfloat16)
        for num_out in (4096, 24576):
            plain = Matrix(torch.empty(num_out, 4096, dtype=x.dtype))
            weight = fp8(num_out, 4096, run=128) if is_fp8 else plain
            if can_multiply(x, weight):
                multiply_few(x, weight, x[0, :1].expand(num_out))
        if is_fp8:
            dequantized(weight, x.dtype)

    return f"bf16, {'FP8' if is_fp8 else 'plain'} weight, {num_tokens} tokens", work


def between() -> None:
    """Of Qwen3 8B: norms, the first without a residual, and SwiGLU."""
    from real.kernels.gpu_layers import rms_norm, silu_and_mul

    x, inner = (torch.zeros(2, size, dtype=torch.bfloat16) for size in (4096, 24576))
    for residual in (None, x):
        rms_norm(x, x[0], 1e-6, residual)
    silu_and_mul(inner)


def fp8(*shape: int, run: int) -> Matrix:
    """A weight in blocks of 128 that share a scale. run: see Scales."""
    from real.layers.fp8 import STORED
    from real.layers.matrix import Matrix, Scales

    *leading, rows, columns = shape
    groups: list[Tensor] = [(torch.arange(size) // 128).int() for size in (rows, columns)]
    scales = Scales(torch.ones(*leading, rows // 128, columns // 128), *groups, run)
    return Matrix(torch.empty(shape, dtype=STORED), scales)


def usage(kernel: Any) -> Usage:
    import triton

    assert triton.__file__ is not None
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(kernel.asm["cubin"])
        command = [str(tool), "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    of = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Usage(of["REG"], of["STACK"] + of["LOCAL"], kernel.metadata.shared, kernel.metadata.num_warps)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.compile", description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS, choices=TARGETS, help="compute capabilities")
    parser.add_argument(
        "--filter", default="", help="only kernels in whose name and target this regular expression is found"
    )
    parser.add_argument("--markdown", action="store_true", help="a table for a document")
    options = parser.parse_args(arguments)
    if is_interpreted():
        print("error: TRITON_INTERPRET is set, with which nothing is compiled; unset it", file=sys.stderr)
        return 2
    begin, end = ("| ", " |") if options.markdown else ("", "")
    row = (begin + (" | " if options.markdown else "  ").join(["{:<40}", *["{:>10}"] * 5]) + end).format
    print(row("kernel", "target", "registers", "local B", "shared B", "warps"))
    if options.markdown:
        print(row("---", *["---:"] * 5))
    for target in options.targets:
        for name, taken in compiled(target, options.filter):
            print(row(name, f"sm_{target}", *taken), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
