"""Converts vLLM's description of itself (real.vllm.observer.describe) to configurations and manifests.

Used for imported logs and for folders of served runs. Does not know how either of them is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.configuration.config import RunConfig
from experiments.configuration.names import device_named
from experiments.configuration.options import options
from experiments.runs.environment import describe_versions, versions_in_vllm
from experiments.runs.run_folder import ABSENT, write_json
from experiments.wiring import build
from testbed.errors import ConfigError, ModelError
from testbed.specs.hf_config import why_uncounted
from testbed.specs.model import DTYPE_BYTES

USUAL: dict[str, Any] = {  # settings that presets do not have, each with the value that has no effect; optional in logs
    "enable_chunked_prefill": True, "scheduler_reserve_full_isl": True, "long_prefill_token_threshold_adaptive": False,
    "max_num_active_seqs": None, "max_num_scheduled_tokens": None, "prefill_schedule_interval": 1,
}  # fmt: skip


def device_of(said: dict[str, Any]) -> str:
    """Returns the entry of the device library for an observed engine's device. Raises ConfigError if there is none."""
    device = said["device"]
    found = "cpu" if device["type"] == "cpu" else device_named(device["name"])
    if found is None:
        raise ConfigError(
            f"vLLM's device is {device['name']!r}, which the device library does not have; say which is nearest with "
            f"--device ({', '.join(options('device'))})"
        )
    return found


def with_model(
    said: dict[str, Any], folder: Path, make: Callable[[dict[str, Any]], RunConfig]
) -> tuple[RunConfig, str]:
    """Returns the configuration that `make` returns for the engine's `model` group, and why its steps cannot be priced
    (empty if they can). folder: created for the model's config.json."""
    model, max_model_len = said["model"], said["config"]["max_model_len"]
    folder.mkdir(exist_ok=True)
    served = {"dtype": model["dtype"]} if model["dtype"] in DTYPE_BYTES else {}  # the file's may be another
    write_json(folder / "config.json", model["hf_config"] | served)
    try:
        config = make({"path": str(folder)})
        why = why_unpriced(said, config)
    except ModelError as error:
        why = _unpriced(said, str(error))
    return (make({"max_position_embeddings": max_model_len}), why) if why else (config, "")


def why_unpriced(said: dict[str, Any], config: RunConfig) -> str:
    """Returns why steps of an observed engine's model cannot be priced; empty if they can. config: of that engine."""
    dtype, spec, max_model_len = said["model"]["dtype"], config.model, said["config"]["max_model_len"]
    if dtype not in DTYPE_BYTES:
        return _unpriced(said, f"the model computes in {dtype!r}, not in one of {', '.join(DTYPE_BYTES)}")
    if why := why_uncounted(spec):
        return _unpriced(said, why)
    if spec.max_length < max_model_len:
        return _unpriced(said, f"config.json has {spec.max_length} positions, and vLLM serves {max_model_len}")
    return ""


def _unpriced(said: dict[str, Any], why: str) -> str:
    return f"{said['model']['name']} has no price here: {why}"


def manifest_in_vllm(said: dict[str, Any], config: RunConfig, command: str) -> dict[str, Any]:
    """Returns the entries of the manifest that are known before a run in vLLM ends. said: the observer's description
    of vLLM."""
    return {
        **ABSENT, "backend": "vllm", **versions_in_vllm(said["vllm"]),
        "code_version": describe_versions()["llm-serving-testbed"],
        "command": command, "seed": config.seed, "tensor_parallel_size": said["device"]["tensor_parallel_size"],
        "scheduler": config.scheduler.name, "victim_of_auto": build.victim_of_auto(config),
        "async_scheduling": config.scheduler.async_scheduling,
        "device": said["device"]["name"], "num_gpu_blocks": said["config"]["num_gpu_blocks"], "num_cpu_blocks": 0,
        "block_size": said["config"]["block_size"], "num_replicas": 1, "num_unsent": 0, "cost_notes": [],
        "num_extrapolated_steps": 0,
    }  # fmt: skip
