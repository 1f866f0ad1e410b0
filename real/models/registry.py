"""Architectures by name, and the refusal of those (and of their options) that this engine would get wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from real.device import Placement
from real.models.interface import CausalLM
from real.models.qwen3 import Qwen3ForCausalLM
from testbed.errors import ConfigError, ModelError
from testbed.specs import ModelSpec, check_ranks, read_hf_config

MODELS: dict[str, Callable[[ModelSpec, Placement], CausalLM]] = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def build_model(spec: ModelSpec, placement: Placement) -> CausalLM:
    """A model with uninitialised weights, of a spec that passed `check_supported`."""
    return MODELS[spec.architecture](spec, placement)


def check_supported(spec: ModelSpec, sliding_window: int | None = None, num_ranks: int = 1) -> None:
    """Raises ModelError for an architecture, or an option in the model's config.json, that no model here reads, and
    ConfigError for a number of ranks among which the model does not divide.

    sliding_window: what attention is told to look back at. A config that asks for a window must ask for this one, in
    every layer: the KV blocks of all layers are released together.
    """
    if spec.architecture not in MODELS:
        where = f" (in {spec.path})" if spec.path else ""
        raise ModelError(
            f"the real engine does not support architecture {spec.architecture!r}{where}; "
            f"supported: {', '.join(MODELS)}"
        )
    if spec.head_dim % 2:
        raise ModelError(f"model.head_dim is {spec.head_dim}; rotary positions need an even one")
    check_ranks(spec, num_ranks)
    if spec.intermediate_size % num_ranks:
        raise ConfigError(
            f"device.tensor_parallel_size is {num_ranks}; it must divide the intermediate_size "
            f"({spec.intermediate_size}) of model {spec.name}"
        )
    if spec.path is not None:
        file, raw = read_hf_config(Path(spec.path))
        _refuse_unknown_options(file, raw)
        _refuse_other_window(file, _window(raw), sliding_window)


def _refuse_unknown_options(file: Path, raw: dict[str, Any]) -> None:
    """Config options that would change the result and that no model here reads: better an error than wrong logits."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    refused = {
        f"rope type {rope_type!r}": rope_type != "default",
        "sliding-window attention in some layers only": _window(raw) is not None and not _slides_everywhere(raw),
        "biases in attention": bool(raw.get("attention_bias")),
        f"activation {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "quantised weights": bool(raw.get("quantization_config")),
    }
    found = [option for option, is_refused in refused.items() if is_refused]
    if found:
        raise ModelError(f"{file} asks for {', '.join(found)}, which the real engine does not support")


def _window(raw: dict[str, Any]) -> Any:
    """The window that a config asks for, by Hugging Face's defaults; None: it asks for none."""
    return raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None


def _slides_everywhere(raw: dict[str, Any]) -> bool:
    """Whether a config that asks for a window asks for it in every layer."""
    kinds = raw.get("layer_types")
    return all(kind == "sliding_attention" for kind in kinds) if kinds else raw.get("max_window_layers") == 0


def _refuse_other_window(file: Path, window: Any, sliding_window: int | None) -> None:
    if window is not None and window != sliding_window:
        raise ModelError(
            f"{file} asks for sliding-window attention over {window} tokens, and cache.sliding_window is "
            f"{'null' if sliding_window is None else sliding_window}; set it to {window}"
        )
