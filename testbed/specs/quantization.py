"""Reads the weight format in the `quantization_config` of a Hugging Face `config.json`. Pure data: no framework.

Supported are 8-bit weights in e4m3 with separate scales, as written by `fp8` (DeepSeek, Qwen) and `compressed-tensors`:
a stored weight times its scale is the weight. A quantisation of activations is ignored: they keep their own format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from testbed.foreign_text import shown

_KEPT = re.compile(
    r"(re:)?.*(lm_head|embed_tokens|norm|(mlp|block_sparse_moe)\.gate)\$?"
)  # modules that no scheme here converts


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Which weights share a scale: blocks of `rows` x `columns`; None: all. A scale has the name of its weight, with
    `scale_name` instead of `weight`."""

    rows: int | None
    columns: int | None
    scale_name: str = "weight_scale"


PER_TENSOR = Fp8Scheme(None, None)
PER_CHANNEL = Fp8Scheme(1, None)  # a scale for each output feature
PER_BLOCK = Fp8Scheme(128, 128, "weight_scale_inv")


def fp8_scheme(raw: dict[str, Any]) -> Fp8Scheme | str | None:
    """Returns the scheme of a config.json; None if its weights are not quantised; a description if the format is not
    supported."""
    config = raw.get("quantization_config") or raw.get("compression_config")  # compressed-tensors before 2025
    if not config:
        return None
    if not isinstance(config, dict):
        return f"quantised weights ({shown(config)})"
    method = config.get("quant_method")
    read = {"fp8": _fp8, "compressed-tensors": _compressed}.get(method) if isinstance(method, str) else None
    if read is None:
        return f"weights quantised by {shown(method)} (not fp8 or compressed-tensors)"
    kept = config.get("modules_to_not_convert") or config.get("ignored_layers") or config.get("ignore") or []
    for name in kept if isinstance(kept, list) else [kept]:
        if not isinstance(name, str) or not _KEPT.fullmatch(name):
            return f"FP8 weights but in {shown(name)}"
    return read(config)


def _fp8(config: dict[str, Any]) -> Fp8Scheme | str:
    size = config.get("weight_block_size")
    fmt, scale_fmt = config.get("fmt", "e4m3"), config.get("scale_fmt", "float")
    if (fmt, scale_fmt) != ("e4m3", "float"):
        return f"FP8 weights in {shown(fmt)} with scales in {shown(scale_fmt)} (not e4m3 and float)"
    return PER_TENSOR if size is None else _of_blocks(size, "weight_scale_inv")


def _of_blocks(size: Any, scale_name: str) -> Fp8Scheme | str:
    if not (isinstance(size, list) and len(size) == 2 and all(type(one) is int and 1 <= one <= 2**20 for one in size)):
        return f"FP8 weights in blocks of {shown(size)}"
    return Fp8Scheme(size[0], size[1], scale_name)


def _compressed(config: dict[str, Any]) -> Fp8Scheme | str:
    groups = config.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict) or group.get("targets") != ["Linear"]:
        return "weights quantised by compressed-tensors in other groups than one of all linear layers"
    kind = (weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True))
    sparsity = config.get("sparsity_config") or {}
    is_dense = isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"
    if kind != ("float", 8, True) or config.get("kv_cache_scheme") or not is_dense:
        return "weights quantised by compressed-tensors as other than symmetric float of 8 bits"
    strategy = weights.get("strategy")
    if strategy == "block":
        return _of_blocks(weights.get("block_structure"), "weight_scale")
    found = {"tensor": PER_TENSOR, "channel": PER_CHANNEL}.get(strategy) if isinstance(strategy, str) else None
    return found or f"weights quantised by compressed-tensors per {shown(strategy)} (not tensor, channel, block)"
