"""Chooses an attention provider: the first that can run, in a fixed order, and says why the others were not taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from real.attention import flash_provider, triton_provider
from real.attention.flash_provider import FlashAttention
from real.attention.interface import AttentionProvider, AttentionSpec
from real.attention.torch_provider import TorchAttention
from real.attention.triton_provider import TritonAttention
from testbed.errors import ConfigError


def _nothing(spec: AttentionSpec) -> None:
    return None


class Entry(NamedTuple):
    """A provider; why it cannot run (None: it can); why `auto` passes it over although it can (None: it does not)."""

    why_not: Callable[[AttentionSpec], str | None]
    create: Callable[[AttentionSpec], AttentionProvider]
    only_by_name: Callable[[AttentionSpec], str | None] = _nothing


PROVIDERS: dict[str, Entry] = {
    "flash_attn": Entry(flash_provider.why_not, FlashAttention),
    "triton": Entry(triton_provider.why_not, TritonAttention, triton_provider.only_by_name),
    "torch": Entry(_nothing, TorchAttention),
}


class Choice(NamedTuple):
    """The provider, and one line for each name in the registry: chosen, or why not."""

    provider: AttentionProvider
    reasons: dict[str, str]


def choose_attention(name: str, spec: AttentionSpec) -> Choice:
    """`auto` or a provider's name -> the provider. Raises ConfigError if the named one cannot run, saying which can."""
    obstacles = {known: entry.why_not(spec) for known, entry in PROVIDERS.items()}
    able = [known for known, obstacle in obstacles.items() if obstacle is None]
    passed_over = {known: why for known in able if (why := PROVIDERS[known].only_by_name(spec)) is not None}
    chosen = next(known for known in able if known not in passed_over) if name == "auto" else name
    if chosen not in able:
        why = obstacles.get(chosen) or "this version has no such provider"
        raise ConfigError(f"backend.attention={chosen} cannot run here: {why}; can run: auto, {', '.join(able)}")
    reasons = {
        known: obstacle or passed_over.get(known) or f"after {chosen} in the order"
        for known, obstacle in obstacles.items()
    }
    reasons[chosen] = "first that can run" if name == "auto" else "asked for"
    return Choice(PROVIDERS[chosen].create(spec), reasons)
