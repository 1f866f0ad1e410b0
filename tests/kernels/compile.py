"""Compiles every kernel ahead of time, without a GPU, and tells what each takes of a multiprocessor.

    python -m tests.kernels.compile [--targets 80 90] [--filter PATTERN] [--markdown]

One line a kernel: registers of a thread, bytes of local memory (spilled registers; 0 is what one wants), bytes of
shared memory of a program, warps of a program. The tilings are those that the engine launches with.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from real.attention.triton_provider import is_interpreted
from tests.kernels.step_shapes import step_shapes

if TYPE_CHECKING:
    from real.kernels.attend import Tiling

TARGETS = (80, 90)
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
BLOCK_SIZE = 16
LONG, SHORT = 4096, 2  # query tokens of the longest row of a step: prefill has a tile for each kind
STEPS: dict[str, dict[str, Any]] = {
    "": {"query_starts": None, "IS_MIXED": False},  # row i is token i: a step of decodes
    " mixed": {"IS_MIXED": True},  # the decodes of any other
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel, specialised. arguments: by name, a type as Triton writes it, or the value of what is constant."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3


class Usage(NamedTuple):
    """What a compiled kernel takes."""

    registers: int  # of a thread
    local_bytes: int  # of a thread: spilled registers
    shared_bytes: int  # of a program
    num_warps: int


def variants(target: int) -> Iterator[Variant]:
    """Every kernel over the shapes that models have."""
    for dtype, label in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        for head_dim in (64, 80, 128, 256):
            for group in (1, 4, 8):
                yield from attention_variants(dtype, label, head_dim, group, None, target)
    for head_dim in (64, 128):
        for fp8 in (torch.float8_e4m3fn, torch.float8_e5m2):
            yield from attention_variants(torch.bfloat16, "bf16", head_dim, 4, fp8, target)
    yield from attention_variants(torch.bfloat16, "bf16", 128, 4, None, target, has_window=True)
    yield from attention_variants(torch.bfloat16, "bf16", 128, 1, None, target, has_alibi=True)
    yield from attention_variants(torch.float32, "fp32", 128, 4, None, target)
    yield from small_variants()
    yield from (variant(*shape) for shape in step_shapes())
    yield from expert_variants(target)


def attention_variants(
    dtype: torch.dtype,
    label: str,
    head_dim: int,
    group: int,
    fp8: torch.dtype | None,
    target: int,
    *,
    has_window: bool = False,
    has_alibi: bool = False,
) -> Iterator[Variant]:
    """Decode in one pass and split, of decodes alone and beside others, and prefill, of a model with 8 KV heads."""
    from real.kernels import decode, prefill
    from real.kernels.formats import as_stored

    cache = torch.empty((2, 1, BLOCK_SIZE, 8, head_dim), dtype=fp8 or dtype, device="meta")
    kv_format = as_stored(cache, divmod(target, 10), 1.0, 1.0).kv_format
    kv_pointer = {0: POINTERS[dtype], 1: "*fp8e4nv" if fp8 == torch.float8_e4m3fn else "*fp8e5"}.get(kv_format, "*u8")
    pointers = {"output": POINTERS[dtype], "query": POINTERS[dtype], "keys": kv_pointer, "values": kv_pointer}
    pad = max(16, 1 << (head_dim - 1).bit_length())
    shape: dict[str, Any] = {
        "GROUP": group, "HEAD_DIM": head_dim, "HEAD_PAD": pad, "BLOCK_SIZE": BLOCK_SIZE, "KV_FORMAT": kv_format,
        "HAS_ALIBI": has_alibi, "HAS_WINDOW": has_window, "slopes": "*fp32" if has_alibi else None,
    }  # fmt: skip
    extras = [
        fp8 is not None and str(fp8).removeprefix("torch.float8_"),
        has_window and "window",
        has_alibi and "alibi",
    ]
    shape_name = " ".join([label, f"head {head_dim}", f"group {group}", *(extra for extra in extras if extra)])
    tile = decode.tiling(head_dim, group, dtype)
    for step, is_split in product(STEPS, (False, True)):
        constants = shape | STEPS[step] | {
            "NUM_HEADS": 8 * group, "GROUP_TILE": tile.block_m, "BLOCK_N": tile.block_n, "IS_SPLIT": is_split,
            "partial": "*fp32" if is_split else None, "items": "*i32" if is_split else None,
        }  # fmt: skip
        name = f"decode{' split' if is_split else ''}{step} {shape_name}"
        yield variant(name, decode.decode_kernel, pointers, constants, tile.num_warps, tile.num_stages)
    for which, tile in prefill_tiles(head_dim, group, dtype, target).items():
        constants = shape | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
        name = f"prefill{which} {shape_name}"
        yield variant(name, prefill.prefill_kernel, pointers, constants, tile.num_warps, tile.num_stages)


def prefill_tiles(head_dim: int, group: int, dtype: torch.dtype, target: int) -> dict[str, Tiling]:
    """The tiles that steps choose between, each under what tells it from the others in a name."""
    from real.kernels.prefill import tiling

    long, short = (tiling(head_dim, group, dtype, longest, divmod(target, 10)) for longest in (LONG, SHORT))
    return {"": long} if short == long else {"": long, " short": short}


def small_variants() -> Iterator[Variant]:
    """The kernels that only move data or join results."""
    from real.kernels import decode, parts, prefill, store

    for kv_format, pointer in ((0, "*bf16"), (2, "*u8"), (3, "*u8")):
        pointers = {"keys": "*bf16", "values": "*bf16", "key_cache": pointer, "value_cache": pointer}
        constants = {
            "NUM_KV_HEADS": 8, "HEADS_TILE": 8, "HEAD_DIM": 128, "HEAD_PAD": 128, "BLOCK_SIZE": BLOCK_SIZE,
            "KV_FORMAT": kv_format,
        }  # fmt: skip
        name = ("", "", " e4m3", " e5m2")[kv_format]
        yield variant(f"store bf16 head 128{name}", store.store_kernel, pointers, constants, 4)
    pointers = {"output": "*bf16", "partial": "*fp32"}
    for step, own in STEPS.items():
        constants = own | {"NUM_HEADS": 32, "HEAD_DIM": 128, "HEAD_PAD": 128, "TILE": decode.REDUCE_TILE}
        yield variant(f"reduce{step} bf16 head 128", decode.reduce_kernel, pointers, constants, 4)
    for step, has_window in product(STEPS, (False, True)):
        constants = STEPS[step] | {
            "LEAST": parts.MIN_PART, "ROWS": parts.ROWS, "ITEMS": parts.ITEMS, "HAS_WINDOW": has_window,
        }  # fmt: skip
        yield variant(f"plan{step}{' window' if has_window else ''}", parts.plan_kernel, {}, constants, 4)
    for which, tokens in (("", 32), (" short", 16)):  # of a tile of four query heads a KV head
        constants = {"TOKENS": tokens, "ROWS": prefill.ROWS, "TILES": prefill.TILES, "SKIPS_FRESH": False}
        yield variant(f"tiles{which}", prefill.tiles_kernel, {}, constants, 4)


def expert_variants(target: int) -> Iterator[Variant]:
    """Both products of Qwen3-30B-A3B's experts, at the least and at the most pairs of a tile."""
    from real.kernels import experts

    fp8 = (1, "*fp8e4nv") if target >= 89 else (2, "*u8")
    plain = {"scales": None, "row_groups": None, "column_groups": None}
    for dtype, label, kind, weight in (
        (torch.bfloat16, "bf16", 0, "*bf16"), (torch.bfloat16, "bf16 e4m3", *fp8), (torch.float32, "fp32", 0, "*fp32")
    ):  # fmt: skip
        pointers = {"output": POINTERS[dtype], "x": POINTERS[dtype], "weight": weight}
        pointers |= {"scales": "*fp32"} if kind else {}
        for block_m in (experts.MIN_TILE, experts.MAX_TILE):
            tiles = {"BLOCK_M": block_m, "BLOCK_N": experts.BLOCK_N, "BLOCK_K": experts.BLOCK_K, "FORMAT": kind}
            tiles |= {} if kind else plain
            name = f"{label} tile {block_m}"
            sizes = {"NUM_IN": 2048, "NUM_OUT": 768, "PER_TOKEN": 8}
            yield variant(f"experts gate-up {name}", experts.gate_up_kernel, pointers, tiles | sizes, 4)
            sizes = {"NUM_IN": 768, "NUM_OUT": 2048}
            shares = {"shares": POINTERS[dtype]}
            yield variant(f"experts down {name}", experts.down_kernel, pointers | shares, tiles | sizes, 4)


INT64 = ("slots",)
FLOATS = ("qk_scale", "value_scale", "inverse_k_scale", "inverse_v_scale")


def variant(
    name: str, kernel: Any, pointers: dict[str, str], constants: dict[str, Any], num_warps: int, num_stages: int = 3
) -> Variant:
    """Fills in the types of what is the same in all variants: indices, scales, strides."""
    types = dict(pointers)
    for argument in kernel.arg_names:
        if argument in constants and isinstance(constants[argument], str):  # a pointer that others leave out
            types[argument] = constants[argument]
        elif argument in constants or argument in types:
            continue
        elif argument in FLOATS:
            types[argument] = "fp32"
        elif argument.startswith(("stride_", "num_")) or argument in ("window", "partial_size"):
            types[argument] = "i32"
        else:
            types[argument] = "*i64" if argument in INT64 else "*i32"
    constants = {key: value for key, value in constants.items() if key not in types}
    return Variant(name, kernel, types, constants, num_warps, num_stages)


def compile_variant(one: Variant, target: int) -> Usage:
    """Raises what Triton raises where a kernel does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: one.types.get(name, "constexpr") for name in one.kernel.arg_names}
    source = ASTSource(fn=one.kernel, signature=signature, constexprs=one.constants, attrs=_aligned(one))
    options = {"num_warps": one.num_warps, "num_stages": one.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers, local = _resources(compiled.asm["cubin"])
    return Usage(registers, local, compiled.metadata.shared, one.num_warps)


def _aligned(one: Variant) -> dict[tuple[int], list[list[object]]]:
    """What a launch finds out by itself: pointers and strides are multiples of 16, but for those it does not ask."""
    unasked = {*one.kernel.do_not_specialize, *one.kernel.do_not_specialize_on_alignment}
    return {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(one.kernel.arg_names)
        if name in one.types and name not in unasked and (one.types[name][0] == "*" or name.startswith("stride_"))
    }


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and local bytes (stack frame included) of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [_cuobjdump(), "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])


def _cuobjdump() -> str:
    import triton

    assert triton.__file__ is not None
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.compile", description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", type=int, nargs="+", default=TARGETS, choices=TARGETS, help="compute capabilities")
    parser.add_argument("--filter", default="", help="only variants in whose name this regular expression is found")
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
        for one in variants(target):
            if re.search(options.filter, one.name):
                print(row(one.name, f"sm_{target}", *compile_variant(one, target)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
