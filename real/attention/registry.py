"""Chooses an attention provider: the first that can run, in a fixed order, and says why the others were not taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from real.attention import cpu_provider, first_step, flash3_provider, flash_provider, triton_provider, varlen_provider
from real.attention.cpu_provider import CpuAttention
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
    "flash_attn_3": Entry(flash3_provider.why_not, flash3_provider.create),
    "flash_attn": Entry(flash_provider.why_not, flash_provider.create),
    "varlen": Entry(varlen_provider.why_not, varlen_provider.create),
    "triton": Entry(triton_provider.why_not, TritonAttention, triton_provider.only_by_name),
    "cpu": Entry(cpu_provider.why_not, CpuAttention),
    "torch": Entry(_nothing, TorchAttention),
}
REFERENCE = "torch"
UNKNOWN = "this version has no such provider"


class Choice(NamedTuple):
    """The provider, and one line for each name in the registry: chosen, or why not."""

    provider: AttentionProvider
    reasons: dict[str, str]

    @property
    def passed_over(self) -> list[str]:
        """A sentence for each provider that stands before the chosen one in the order."""
        before = list(self.reasons)[: list(self.reasons).index(self.provider.name)]
        return [f"attention={name} is passed over for {self.provider.name}: {self.reasons[name]}" for name in before]


def choose_attention(name: str, spec: AttentionSpec) -> Choice:
    """`auto` or a provider's name -> the provider, which on a GPU has made a first step. Raises ConfigError if the one
    that is named cannot run, saying which can."""
    obstacles = {known: entry.why_not(spec) for known, entry in PROVIDERS.items()}
    passed_over = {known: why for known, entry in PROVIDERS.items() if (why := entry.only_by_name(spec)) is not None}
    wanted = [known for known in PROVIDERS if known not in passed_over] if name == "auto" else [name]
    for chosen in wanted:
        if obstacles.get(chosen, UNKNOWN) is not None:
            continue
        provider = PROVIDERS[chosen].create(spec)
        obstacles[chosen] = _why_it_fails(provider, spec)
        if obstacles[chosen] is None:
            reasons = {
                known: obstacle or passed_over.get(known) or f"after {chosen} in the order"
                for known, obstacle in obstacles.items()
            }
            reasons[chosen] = "first that can run" if name == "auto" else "asked for"
            return Choice(provider, reasons)
    able = ", ".join(["auto", *(known for known, obstacle in obstacles.items() if obstacle is None)])
    why = obstacles.get(name, UNKNOWN)
    raise ConfigError(f"backend.attention={name} cannot run here: {why}; can run: {able}")


def choose_together(name: str, spec: AttentionSpec, latest: Callable[[int], int]) -> Choice:
    """The same, one for all ranks: what one of them passes over is used by none. latest: the largest of their numbers.

    Ranks with different providers would not capture the same steps, and wait for each other in vain.
    """
    choice, names = choose_attention(name, spec), list(PROVIDERS)
    common = names[latest(names.index(choice.provider.name))]
    return choice if common == choice.provider.name else choose_attention(common, spec)


def _why_it_fails(provider: AttentionProvider, spec: AttentionSpec) -> str | None:
    """On a GPU, of all but the reference, which stands at the end."""
    is_tried = spec.device.type == "cuda" and provider.name != REFERENCE
    return first_step.why_it_fails(provider, spec) if is_tried else None
