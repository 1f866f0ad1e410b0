"""Writes small checkpoints of random weights, in Hugging Face's layout, for tests and demonstrations."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from real.device import Placement, resolve_dtype
from real.loader import SINGLE_FILE, checkpoint_slots, fill_random
from real.models.registry import build_model, check_supported
from testbed.errors import ModelError
from testbed.specs import ModelSpec


def make_checkpoint(path: str | Path, spec: ModelSpec, seed: int = 0) -> Path:
    """Writes config.json and model.safetensors into a new or empty folder, and returns it.

    The same spec and seed give the same weights. Raises ModelError if the folder holds anything.
    """
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is not an empty folder; a checkpoint is never written over something")
    check_supported(spec)
    model = build_model(spec, Placement(torch.device("cpu"), resolve_dtype(None, spec)))
    fill_random(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: slot.view.contiguous().clone() for name, slot in checkpoint_slots(model).items()}
    save_file(weights, folder / SINGLE_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(spec), indent=2) + "\n")
    return folder


def hf_config(spec: ModelSpec) -> dict[str, object]:
    """The spec as a Hugging Face `config.json` of a Qwen3 model."""
    return {
        "architectures": [spec.architecture],
        "model_type": "qwen3",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": spec.dtype,
        "eos_token_id": spec.eos_token_id,
    }
