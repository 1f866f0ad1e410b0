"""Finds settings of a generated trace that were changed and have no effect with the others; its notes list them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from testbed.traces.arrivals import without_effect
from testbed.traces.conversations import length_configs
from testbed.traces.generator_config import SyntheticConfig, tenants_of
from testbed.traces.lengths import LengthConfig

_OF_LENGTHS = {"value": ("constant", "lognormal"), "sigma": ("lognormal",), "exponent": ("zipf",)}


def idle_notes(config: SyntheticConfig) -> list[str]:
    """Returns a note for each such setting. A tenant's own settings are named by the tenant's position."""
    if not config.tenants:
        return [f"trace.{key} has no effect with {why}" for key, why in _idle(config, SyntheticConfig()).items()]
    notes: list[str] = []
    parts = list(tenants_of(config).values())
    for key, why in _idle(replace(config, tenants=()), SyntheticConfig()).items():
        if all(key in _unused(part) for part in parts):
            notes.append(f"trace.{key} has no effect with {why}")
    if config.num_tenants:
        notes.append("trace.num_tenants has no effect with trace.tenants")
    for position, (entry, part) in enumerate(zip(config.tenants, parts, strict=True)):
        where = f"trace.tenants[{position}]"
        own = {key: why for key, why in _idle(part, config).items() if _is_given(entry, key)}
        notes += [f"{where}.{key} has no effect with {why}" for key, why in own.items()]
    return notes


def _is_given(entry: Mapping[str, Any], key: str) -> bool:
    """Whether a tenant's entry contains a setting, given by its path."""
    found: Any = entry
    for name in key.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return False
        found = found[name]
    return True


def _idle(config: SyntheticConfig, usual: SyntheticConfig) -> dict[str, str]:
    """Returns the unused settings that differ from `usual`: path -> why it is unused."""
    return {key: why for key, why in _unused(config).items() if _at(config, key) != _at(usual, key)}


def _at(config: SyntheticConfig, path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = getattr(LengthConfig() if found is None else found, name)  # turn_prompt may be absent
    return found


def _unused(config: SyntheticConfig) -> dict[str, str]:
    """Returns all settings that have no effect with the others: path -> why."""
    unused = dict.fromkeys(without_effect(config), f"trace.arrival={config.arrival}")
    for keys, is_used, why in _uses(config):
        if not is_used:
            unused.update(dict.fromkeys(keys, f"trace.{why}"))
    for name, lengths in length_configs(config).items():
        for key, kinds in _OF_LENGTHS.items():
            if lengths.kind not in kinds:
                unused[f"{name}.{key}"] = f"trace.{name}.kind={lengths.kind}"
    return unused


def _uses(config: SyntheticConfig) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Yields (settings, whether they are used, the setting that decides it)."""
    are_users, has_turns = config.arrival == "closed_loop", config.max_turns > 1
    has_calls = config.agent.max_calls > 0
    yield ("num_users",), are_users, f"arrival={config.arrival}"
    yield ("turn_prompt",), has_turns, "max_turns=1"
    yield ("think", "think_time_s"), has_turns or are_users, "max_turns=1"
    yield ("closed_loop",), has_turns or has_calls or are_users, "max_turns=1"
    yield ("closed_loop",), not are_users, "arrival=closed_loop"
    yield ("system_prompt_tokens", "system_prompt_skew"), config.num_system_prompts > 0, "num_system_prompts=0"
    shots = ("few_shot.num_examples", "few_shot.example", "few_shot.skew")
    yield shots, config.few_shot.num_tasks > 0, "few_shot.num_tasks=0"
    documents = ("rag.documents_per_prompt", "rag.document", "rag.skew")
    yield documents, config.rag.num_documents > 0, "rag.num_documents=0"
    yield ("agent.call", "agent.result", "agent.tool_time_s"), has_calls, "agent.max_calls=0"
