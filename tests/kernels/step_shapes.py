"""The kernels around attention, each in the shapes that it is compiled in ahead of time (compile.py)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """types: of its arguments, as Triton writes them. constants: what stays the same, None: what is left out."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int


def step_shapes() -> Iterator[Shape]:
    yield from _heads()
    yield from _moves()
    yield from _draws()


def _heads() -> Iterator[Shape]:
    """Of Qwen3 8B, with normalised heads, and of Llama 3.1 8B, without; KV memory in the model's format and as FP8."""
    from real.kernels import heads

    names = ("query", "key", "value", "query_weight", "key_weight", "cos", "sin")
    for has_norm, (kv_format, cache, of_cache) in product((True, False), ((0, "*bf16", ""), (2, "*u8", " e4m3"))):
        types = dict.fromkeys(names, "*bf16") | {"key_cache": cache, "value_cache": cache, "eps": "fp32"}
        constants: dict[str, Any] = {
            "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "HALF_PAD": 64, "BLOCK_SIZE": 16, "KV_FORMAT": kv_format,
            "HAS_NORM": has_norm,
        }  # fmt: skip
        if not has_norm:
            constants |= {"query_weight": None, "key_weight": None}
            types = {name: kind for name, kind in types.items() if name not in constants}
        yield Shape(f"heads{' norm' if has_norm else ''}{of_cache}", heads.heads_kernel, types, constants, 1)


def _moves() -> Iterator[Shape]:
    """Blocks of 16 tokens, 8 KV heads of 128 numbers of 16 bits: of a layer that is swapped, of 28 that are copied."""
    from real.kernels import block_copy

    types = {"target": "*i64", "source": "*i64", "pairs": "*i64"}
    for name, planes in (("swap", 2), ("copy", 56)):
        constants = {"PLANES": planes, "WORDS": 4096, "CHUNK": block_copy.CHUNK}
        yield Shape(name, block_copy.move_kernel, types, constants, 4)


def _draws() -> Iterator[Shape]:
    """Sampling at the vocabulary of Qwen3."""
    from real.kernels import race

    types = {
        "logits": "*fp32", "largest": "*fp32", "least": "*fp32", "temperatures": "*fp32", "log_min_p": "*fp32",
        "top_p": "*fp32", "scores": "*fp32", "rows": "*i64", "top_k": "*i64", "keys": "*i64", "token_ids": "*i64",
        "targets": "*i64", "winners": "*i32", "vocab_size": "i32",
    }  # fmt: skip
    parts: dict[str, Any] = {"PARTS_PAD": 32}
    whole = parts | {"PART": race.PART, "BLOCK": race.BLOCK}
    kept = {"IS_FILTERED": False, "least": None}
    for name, kernel, constants, num_warps in (
        ("draw largest", race.largest_kernel, whole, 4),
        ("draw least", race.least_kernel, parts | {"BLOCK": race.FILTER_BLOCK}, 16),
        ("draw race", race.race_kernel, whole | kept, 4),
        ("draw race filtered", race.race_kernel, whole | {"IS_FILTERED": True}, 4),
        ("draw pick", race.pick_kernel, parts, 1),
    ):
        own = {key: value for key, value in constants.items() if key in kernel.arg_names}
        named = {key: value for key, value in types.items() if key in kernel.arg_names and key not in own}
        yield Shape(name, kernel, named, own, num_warps)
