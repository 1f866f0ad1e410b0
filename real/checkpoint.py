"""Writes small checkpoints with random weights, in Hugging Face's layout, for tests and demonstrations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from real.device import Placement, resolve_dtype
from real.loader import SINGLE_FILE, checkpoint_slots, fill_random
from real.models.registry import build_model, check_supported
from testbed.errors import ModelError
from testbed.specs.model import ModelSpec, RopeScaling
from testbed.specs.quantization import PER_BLOCK, PER_TENSOR, Fp8Scheme

# fields of a spec that have the same name in config.json: of all models; of all but OPT; of experts
SAME = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings",
    "tie_word_embeddings", "eos_token_id",
)  # fmt: skip
SAME_IN_LLAMA = (
    "intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "hidden_act",
    "attention_bias", "mlp_bias", "sliding_window",
)  # fmt: skip
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
ROPE_KEYS = {
    "linear": (),
    "dynamic": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
        "truncate",
    ),
}  # fmt: skip


def make_checkpoint(path: str | Path, spec: ModelSpec, seed: int = 0, scheme: Fp8Scheme | None = None) -> Path:
    """Writes config.json and model.safetensors to a new or empty folder; returns the folder.

    The same spec and seed give the same weights. scheme: quantisation, if the spec's dtype is fp8; None: per block.
    Raises ModelError if the folder is not empty, or if the spec is not supported.
    """
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is not an empty folder; a checkpoint is never written over something")
    check_supported(spec, spec.sliding_window)
    scheme = scheme or (PER_BLOCK if spec.dtype == "fp8" else None)
    model = build_model(spec, Placement(torch.device("cpu"), resolve_dtype(None, spec)), scheme)
    fill_random(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: slot.view.contiguous().clone() for name, slot in checkpoint_slots(model).items()}
    save_file(weights, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(spec, scheme), indent=2) + "\n")
    return folder


def hf_config(spec: ModelSpec, scheme: Fp8Scheme | None = None) -> dict[str, object]:
    """Returns the spec as a Hugging Face `config.json`, with the keys of transformers 4, which 5 reads too."""
    common = {
        "architectures": [spec.architecture],
        "model_type": re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", spec.architecture.removesuffix("ForCausalLM")).lower(),
        "torch_dtype": "bfloat16" if spec.dtype == "fp8" else spec.dtype,
        **_fields(spec, SAME),
    }
    if scheme is not None:
        common["quantization_config"] = _quantization_config(scheme)
    return common | (_opt_config(spec) if spec.architecture == "OPTForCausalLM" else _llama_config(spec))


def _quantization_config(scheme: Fp8Scheme) -> dict[str, object]:
    if scheme != PER_TENSOR and scheme.scale_name == "weight_scale":
        strategy = "channel" if scheme.columns is None else "block"
        block = {} if scheme.columns is None else {"block_structure": [scheme.rows, scheme.columns]}
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **block}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    block_size = {} if scheme.rows is None else {"weight_block_size": [scheme.rows, scheme.columns]}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"], **block_size}


def _llama_config(spec: ModelSpec) -> dict[str, object]:
    config = {**_fields(spec, SAME_IN_LLAMA), "rope_scaling": _rope_config(spec.rope_scaling)}
    if spec.architecture.startswith("Qwen"):
        config |= {"use_sliding_window": spec.sliding_window is not None, "max_window_layers": 0}
    return config | ({} if spec.num_experts is None else _fields(spec, EXPERTS))


def _fields(spec: ModelSpec, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(spec, name) for name in names}


def _rope_config(scaling: RopeScaling | None) -> dict[str, object] | None:
    """Returns only the keys that this type of scaling reads, as transformers warns about others."""
    if scaling is None:
        return None
    keys = ("rope_type", "factor", *ROPE_KEYS[scaling.rope_type])
    return {key: value for key in keys if (value := getattr(scaling, key)) is not None}


def _opt_config(spec: ModelSpec) -> dict[str, object]:
    """Raises ModelError for a shape that Hugging Face's OPT config cannot express."""
    if spec.attention_bias != spec.mlp_bias or spec.num_key_value_heads != spec.num_attention_heads:
        raise ModelError(
            f"model {spec.name} cannot be written as an OPT checkpoint: attention_bias and mlp_bias must be the same, "
            "and so must num_key_value_heads and num_attention_heads"
        )
    return {
        "ffn_dim": spec.intermediate_size,
        "word_embed_proj_dim": spec.embedding_size,
        "activation_function": spec.hidden_act,
        "enable_bias": spec.attention_bias,
        "do_layer_norm_before": spec.do_layer_norm_before,
    }
