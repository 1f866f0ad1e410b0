"""Turns the keyword arguments of `LLM` into a model, its tokenizer, and overrides of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from experiments.configuration.compose import to_overrides
from experiments.configuration.config import GROUPS
from experiments.configuration.options import options
from real.config import RealConfig
from real.text.tokenizer import Tokenizer, has_tokenizer, load_tokenizer, read_tokenizer
from real.vllm.config import VllmConfig
from sim.config import SimConfig
from testbed.errors import ConfigError, ModelError
from testbed.foreign_text import unknown
from testbed.routing.config import FLEET_KEYS
from testbed.specs.hf_config import end_tokens, load_hf_config

SETTINGS = {  # keyword argument -> key of the configuration
    "dtype": "backend.dtype",
    "device": "backend.device",
    "attention": "backend.attention",
    "load_format": "backend.load_format",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_model_len": "scheduler.max_model_len",
    "block_size": "cache.block_size",
    "num_gpu_blocks": "cache.num_gpu_blocks",
    "num_cpu_blocks": "cache.num_cpu_blocks",
    "swap_space": "cache.swap_space_gib",
    "gpu_memory_utilization": "cache.gpu_memory_utilization",
    "kv_cache_dtype": "cache.kv_dtype",
    "prefix_caching": "cache.prefix_caching",
    "enable_prefix_caching": "cache.prefix_caching",  # vLLM's name
    "num_gpu_blocks_override": "cache.num_gpu_blocks",  # vLLM's name
    "tensor_parallel_size": "device.tensor_parallel_size",
    "seed": "seed",
}
WORDS: dict[str, dict[str, str | None]] = {
    "dtype": {"auto": None, "half": "float16", "float": "float32"},
    "kv_cache_dtype": {"auto": None},
}  # values that vLLM accepts, and the testbed's name for each; None: leave the default
READ = ("backend", "scheduler", "cache", "model", "device", "cost", "seed")  # what text reads of the configuration
# keys of `backend` that it does not read
OF_RUNS = tuple(f"backend.{name}" for name in ("pace", "probe_ns", "speed", *FLEET_KEYS))
_OF_OTHERS = {item.name for kind in (SimConfig, VllmConfig) for item in fields(kind)}
_OF_OTHERS -= {item.name for item in fields(RealConfig)}
ARGUMENTS = ("model", "tokenizer", "scheduler", "status_s")  # parameters that LLM declares by name
TINY = "tiny"


class FoundModel(NamedTuple):
    """Where a model's shape, weights and tokenizer come from.

    folder: the checkpoint; None if the weights are random. eos_ids: the EOS tokens that the checkpoint's files and its
    own tokenizer state, in addition to the EOS token of the model's shape.
    """

    name: str
    overrides: list[str]
    folder: Path | None
    tokenizer: Tokenizer | None
    eos_ids: tuple[int | None, ...] = ()


def find_model(model: str, tokenizer: Any, load_format: str | None) -> FoundModel:
    """Finds a model by path or name. A folder that has a model's name but no checkpoint is ignored if that model needs
    no files. Raises ModelError if there is no such model, ConfigError if there is no such tokenizer."""
    path = Path(model)
    given = None if tokenizer is None else read_tokenizer(tokenizer)
    needs_no_files = model == TINY or (load_format == "dummy" and model in options("model"))
    if path.is_file() or (path / "config.json").is_file() or (path.exists() and not needs_no_files):
        folder = path if path.is_dir() else path.parent
        load_hf_config(path)  # first: the tokenizer reads this file too, and an error in it would name the tokenizer
        own = load_tokenizer(folder) if given is None and has_tokenizer(folder) else None
        overrides = to_overrides({"model": {"path": str(path)}})
        eos_ids = (*end_tokens(folder), own.eos_token_id if own else None)
        return FoundModel(path.resolve().name, overrides, folder, given or own, eos_ids)
    if model == TINY:
        from real.text.tokenizer import train_tokenizer

        trained = given or train_tokenizer()
        size = f"model.vocab_size={trained.num_tokens}"
        return FoundModel(TINY, ["model=tiny", size, "backend.load_format=dummy"], None, trained)
    if needs_no_files:
        return FoundModel(model, [f"model={model}"], None, given)
    raise ModelError(
        f"no model at {model}: expected a local folder with config.json and safetensors. 'tiny' needs none (random "
        "weights and a tokenizer made on the spot); with load_format=dummy any name of `testbed list model` goes"
    )


def settings_to_overrides(settings: dict[str, Any]) -> list[str]:
    """Returns overrides of the configuration; None leaves a key unchanged. Raises ConfigError for an unknown name, and
    for a key that text does not read."""
    tree: dict[str, Any] = {}
    settings = dict(settings)
    if settings.pop("enforce_eager", None):  # vLLM's name
        _put(tree, "backend.cuda_graphs", False, "enforce_eager")
    for name, value in settings.items():
        if name not in SETTINGS and name.partition(".")[0] not in GROUPS:
            names = dict.fromkeys((*ARGUMENTS, *SETTINGS, "enforce_eager", *READ))  # some are groups, too
            raise ConfigError(unknown(f"LLM has no argument {name!r}", name, [*names]))
        if name == "dtype" and not isinstance(value, str | None):
            value = str(value).removeprefix("torch.")  # a torch.dtype
        if isinstance(value, str) and value in WORDS.get(name, {}):
            value = WORDS[name][value]
        key = name if isinstance(value, Mapping) else SETTINGS.get(name, name)  # device={…} means the group `device`
        if isinstance(value, str) and key in GROUPS:
            value = {"name": value}
        if value is not None:
            _put(tree, key, value, name)
    return to_overrides(tree)


def _put(tree: dict[str, Any], key: str, value: Any, name: str) -> None:
    """Puts a value, or each value of a mapping, at its dotted key. Raises ConfigError if another value is there."""
    if isinstance(value, Mapping):
        for part, inner in value.items():
            _put(tree, f"{key}.{part}", inner, name)
        return
    _check_read(key, value)
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    if last in tree:
        raise ConfigError(f"LLM was given {key} twice: {tree[last]!r}, and {value!r} by {name}; leave one of them out")
    tree[last] = value


def _check_read(key: str, value: Any) -> None:
    """Raises ConfigError for a key of the configuration that text does not read, or for another backend."""
    given, (group, _, name) = key.removesuffix(".name"), key.partition(".")
    if given == "backend" and value != "real":
        raise ConfigError(f"backend={value}: text comes from the real engine only; leave it out")
    if group == "sampling":
        own = f"{name}=…" if name and given == key else "…"
        raise ConfigError(
            f"{given} is of runs of traces; text takes SamplingParams({own}) with the prompts (`testbed generate`: a "
            "flag, or a row of --prompts-file)"
        )
    is_of_another = group == "backend" and name.partition(".")[0] in _OF_OTHERS
    if group not in READ or key.startswith(OF_RUNS) or is_of_another:
        raise ConfigError(f"{given} is of runs of traces, and text does not read it; leave it out")
