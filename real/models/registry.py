"""Architectures by name. Rejects architectures, and options of them, for which this engine would give wrong results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from real.device import Placement
from real.layers.activation import PLAIN
from real.layers.rotary import ROPE_TYPES
from real.models.interface import CausalLM
from real.models.llama import LlamaForCausalLM
from real.models.opt import OPTForCausalLM
from testbed.errors import ConfigError, ModelError
from testbed.specs.hf_config import load_hf_config, read_hf_config, uneven_layers
from testbed.specs.model import ModelSpec, check_ranks
from testbed.specs.quantization import PER_BLOCK, Fp8Scheme, fp8_scheme

MOE = "Qwen3MoeForCausalLM"
MODELS: dict[str, Callable[..., CausalLM]] = {
    "Qwen3ForCausalLM": LlamaForCausalLM,
    MOE: LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "OPTForCausalLM": OPTForCausalLM,
}
SILENT = ("architecture", "hidden_act", "sliding_window")
SILENT_OF_ROPE = (*SILENT, "rms_norm_eps", "rope_theta", "rope_scaling")
SILENT_OF_EXPERTS = (*SILENT_OF_ROPE, "num_experts_per_tok", "norm_topk_prob")
SILENT_OF_OPT = (*SILENT, "do_layer_norm_before")


def build_model(spec: ModelSpec, placement: Placement, scheme: Fp8Scheme | None = None) -> CausalLM:
    """Returns a model with uninitialised weights. spec: has passed `check_supported`. scheme: quantisation of the
    weights; None: the spec's own."""
    scheme = scheme or _scheme_of(spec)
    how = {} if scheme is None else {"scheme": scheme}
    return MODELS[spec.architecture](spec, placement, **how)


def _scheme_of(spec: ModelSpec) -> Fp8Scheme | None:
    """Returns how the weights are quantised: as its folder states; without a folder, per block."""
    if spec.dtype != "fp8":
        return None
    scheme = fp8_scheme(read_hf_config(spec.path)[1]) if spec.path else PER_BLOCK
    assert isinstance(scheme, Fp8Scheme)
    return scheme


def check_supported(
    spec: ModelSpec, sliding_window: int | None = None, num_ranks: int = 1, max_model_len: int | None = None
) -> None:
    """Raises ModelError for an architecture, or an option of it, that no model here computes correctly. Raises
    ConfigError for a number of ranks that does not divide the model, and for sequences beyond its learned positions.

    sliding_window: the window that attention uses. If the model has a window, it must be this one in every layer,
    because the KV blocks of all layers are released together.
    """
    where = f" (in {spec.path})" if spec.path else ""
    if spec.architecture not in MODELS:
        raise ModelError(
            f"the real engine does not support architecture {spec.architecture!r}{where}; "
            f"supported: {', '.join(MODELS)}"
        )
    refused = _refused_shape(spec)
    if spec.path:
        refused += _refused_options(spec.architecture, read_hf_config(spec.path)[1])
    if refused:
        raise ModelError(f"model {spec.name}{where} has {', '.join(refused)}, which the real engine does not support")
    if spec.path:
        _check_agrees(spec, spec.path)
    _check_window(spec, where, sliding_window)
    _check_ranks(spec, num_ranks)
    if not spec.has_rotary and (max_model_len or 0) > spec.max_position_embeddings:
        raise ConfigError(
            f"the longest sequence is set to {max_model_len} tokens, and model {spec.name} has learned positions for "
            f"{spec.max_position_embeddings}; lower scheduler.max_model_len"
        )


def _refused_shape(spec: ModelSpec) -> list[str]:
    """Describes the properties of a spec that would give wrong logits."""
    has_rope = spec.has_rotary
    activations = ("silu",) if has_rope else tuple(PLAIN)
    rope_type = spec.rope_scaling.rope_type if spec.rope_scaling else None
    refused = {
        f"activation {spec.hidden_act!r} (not {' or '.join(activations)})": spec.hidden_act not in activations,
        f"rope type {rope_type!r} (not {', '.join(ROPE_TYPES)})": has_rope and rope_type not in (None, *ROPE_TYPES),
        f"head_dim {spec.head_dim}, odd or 2, under rotary positions": has_rope
        and (spec.head_dim % 2 > 0 or (rope_type == "dynamic" and spec.head_dim == 2)),
        f"an embedding of {spec.embedding_size} dimensions for layers of {spec.hidden_size}": has_rope
        and spec.embedding_size != spec.hidden_size,
        "FP8 weights in OPT": spec.dtype == "fp8" and not has_rope,
        f"num_experts {spec.num_experts}": (spec.experts is not None) != (spec.architecture == MOE),
    }
    return [option for option, is_refused in refused.items() if is_refused]


def _refused_options(architecture: str, raw: dict[str, Any]) -> list[str]:
    """Describes the options of a config.json that would change the result and that no model here reads."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    scheme = fp8_scheme(raw)
    refused = {
        scheme if isinstance(scheme, str) else "": isinstance(scheme, str),
        f"rotary positions in a part of each head ({share})": share not in (None, 1),
        "LayerNorm without weights": raw.get("layer_norm_elementwise_affine") is False,
        "its final LayerNorm removed": bool(raw.get("_remove_final_layer_norm")),
    }
    return uneven_layers(architecture, raw) + [option for option, is_refused in refused.items() if is_refused]


def _check_agrees(spec: ModelSpec, path: str) -> None:
    """Raises ModelError if the spec differs from its config.json in a field that no weight's shape reveals."""
    said = load_hf_config(path)
    if (spec.dtype == "fp8") != (said["dtype"] == "fp8"):
        raise ModelError(
            f"model {spec.name} has dtype {spec.dtype!r}, and {path} has weights in {said['dtype']!r}; leave "
            "model.dtype as it is there"
        )
    of_rope = SILENT_OF_ROPE if spec.experts is None else SILENT_OF_EXPERTS
    for name in of_rope if spec.has_rotary else SILENT_OF_OPT:
        if getattr(spec, name) != said[name]:
            raise ModelError(
                f"model {spec.name} has {name} {getattr(spec, name)!r}, and {path} says {said[name]!r}; "
                "take the spec from there (testbed.specs.hf_config.load_hf_config)"
            )


def _check_window(spec: ModelSpec, where: str, sliding_window: int | None) -> None:
    if spec.sliding_window is not None and spec.sliding_window != sliding_window:
        raise ModelError(
            f"model {spec.name}{where} has sliding-window attention over {spec.sliding_window} tokens, and "
            f"cache.sliding_window is {'null' if sliding_window is None else sliding_window}; "
            f"set it to {spec.sliding_window}"
        )


def _check_ranks(spec: ModelSpec, num_ranks: int) -> None:
    check_ranks(spec, num_ranks)
    name = "intermediate_size" if spec.moe_intermediate_size is None else "moe_intermediate_size"
    if getattr(spec, name) % num_ranks:
        raise ConfigError(
            f"device.tensor_parallel_size is {num_ranks}; it must divide the {name} ({getattr(spec, name)}) of model "
            f"{spec.name}"
        )
