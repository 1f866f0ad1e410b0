"""Architectures by name, and the refusal of those (and of their options) that this engine would get wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from real.device import Placement
from real.models.interface import CausalLM
from real.models.qwen3 import Qwen3ForCausalLM
from testbed.errors import ModelError
from testbed.specs import ModelSpec, read_hf_config

MODELS: dict[str, Callable[[ModelSpec, Placement], CausalLM]] = {"Qwen3ForCausalLM": Qwen3ForCausalLM}


def build_model(spec: ModelSpec, placement: Placement) -> CausalLM:
    """A model with uninitialised weights. Raises ModelError for what is not supported."""
    check_supported(spec)
    return MODELS[spec.architecture](spec, placement)


def check_supported(spec: ModelSpec) -> None:
    """Raises ModelError for an architecture, or an option in the model's config.json, that no model here reads."""
    if spec.architecture not in MODELS:
        where = f" (in {spec.path})" if spec.path else ""
        raise ModelError(
            f"the real engine does not support architecture {spec.architecture!r}{where}; "
            f"supported: {', '.join(MODELS)}"
        )
    if spec.head_dim % 2:
        raise ModelError(f"model.head_dim is {spec.head_dim}; rotary positions need an even one")
    if spec.path is not None:
        _refuse_unknown_options(Path(spec.path))


def _refuse_unknown_options(path: Path) -> None:
    """Config options that would change the result and that no model here reads: better an error than wrong logits."""
    file, raw = read_hf_config(path)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    refused = {
        f"rope type {rope_type!r}": rope_type != "default",
        "sliding-window attention": bool(raw.get("use_sliding_window")),
        "biases in attention": bool(raw.get("attention_bias")),
        f"activation {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "quantised weights": bool(raw.get("quantization_config")),
    }
    found = [option for option, is_refused in refused.items() if is_refused]
    if found:
        raise ModelError(f"{file} asks for {', '.join(found)}, which the real engine does not support")
