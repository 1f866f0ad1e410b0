"""Look-up of devices and models of the library, and the shapes of a model's layers."""

from __future__ import annotations

from functools import lru_cache

from experiments.configuration.compose import compose_config
from experiments.configuration.options import options
from experiments.configuration.overrides import library_of, with_searched
from testbed.errors import ConfigError
from testbed.foreign_text import unknown
from testbed.specs.device import DeviceSpec
from testbed.specs.model import ModelSpec


def entry(group: str, given: str | None, named: str | None = None, called: str = "") -> str:
    """The library's entry: that of --device or --model, if given, else `named`, the one of the source's name `called`.
    Raises ConfigError if the library does not have it."""
    known = options(group)
    if given is not None and given not in known:
        raise ConfigError(unknown(f"--{group} is {given!r}", given, known))
    found = named if given is None else given
    if found is None:
        problem = f"the library has no {group} {called!r}; say which it is with --{group}"
        raise ConfigError(unknown(problem, called, known))
    return found


@lru_cache(maxsize=64)
def device_spec(name: str, config_dir: str | None = None) -> DeviceSpec | None:
    """The data sheet of a device of the library, or of the user's own options; None if neither has it. Cached, as every
    run of a sweep asks."""
    searched = with_searched([] if config_dir is None else [f"--config-dir={config_dir}"])
    known = library_of(searched).names("device")
    return compose_config([*searched, f"device={name}"]).device if name in known else None


def model_spec(name: str) -> ModelSpec:
    return compose_config([f"model={name}"]).model


def layer_shapes(spec: ModelSpec, size: int) -> dict[str, tuple[str, int, int | None]]:
    """(operator, n, k) of each layer on one of `size` ranks; k is None unless the layer is a GEMM."""
    hidden, inner = spec.hidden_size, spec.intermediate_size // size
    q_size = spec.num_attention_heads * spec.head_dim // size
    kv_size = spec.num_kv_heads_per_rank(size) * spec.head_dim
    vocab, all_heads = -(-spec.vocab_size // size), spec.num_attention_heads + spec.num_key_value_heads
    return {
        "qkv_proj": ("gemm", q_size + 2 * kv_size, hidden),
        "o_proj": ("gemm", hidden, q_size),
        "gate_up_proj": ("gemm", (spec.num_mlp_matrices - 1) * inner, hidden),
        "down_proj": ("gemm", hidden, inner),
        "lm_head": ("gemm", vocab, hidden),
        "act_fn": ("elementwise", inner, None),
        "embedding": ("elementwise", hidden, None),
        "layernorm": ("elementwise", hidden, None),
        "final_layernorm": ("elementwise", hidden, None),
        "qk_norm": ("elementwise", all_heads * spec.head_dim, None),  # of one rank: see llmservingsim
        "rotary_emb": ("elementwise", q_size + kv_size, None),
        "sampler": ("sampler", spec.vocab_size, None),
    }
