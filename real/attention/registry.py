"""Chooses an attention provider: the first that can run, in a fixed order. Gives the reasons against the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from real.attention import cpu_provider, first_step, flash3_provider, flash_provider, triton_provider, varlen_provider
from real.attention.cpu_provider import CpuAttention
from real.attention.interface import AttentionProvider, AttentionSpec
from real.attention.torch_provider import TorchAttention
from real.attention.triton_provider import TritonAttention
from testbed.errors import ConfigError


class Entry(NamedTuple):
    """How to create a provider. why_not: why it cannot run; None: it can. only_by_name: why `auto` passes over it
    although it can run; None: it does not."""

    why_not: Callable[[AttentionSpec], str | None]
    create: Callable[[AttentionSpec], AttentionProvider]
    only_by_name: Callable[[], str | None] = lambda: None


PROVIDERS: dict[str, Entry] = {
    "flash_attn_3": Entry(flash3_provider.why_not, flash3_provider.create),
    "flash_attn": Entry(flash_provider.why_not, flash_provider.create),
    "varlen": Entry(varlen_provider.why_not, varlen_provider.create),
    "triton": Entry(triton_provider.why_not, TritonAttention, triton_provider.only_by_name),
    "cpu": Entry(cpu_provider.why_not, CpuAttention),
    "torch": Entry(lambda spec: None, TorchAttention),
}
REFERENCE = "torch"
# Without a first step there, which takes 0.06 s by one thread and up to 0.6 s on busy cores: no library and no compiler
# of a GPU is in them, and the tests compare them with float64.
UNTRIED_ON_CPU = ("triton", "cpu", REFERENCE)
UNKNOWN = "this version has no such provider"


class Choice(NamedTuple):
    """The provider, and for each name in the registry one line on why it was chosen or not."""

    provider: AttentionProvider
    reasons: dict[str, str]

    @property
    def passed_over(self) -> str:
        """One line with the providers that come before the chosen one in the order, and why; empty if none do."""
        before = list(self.reasons)[: list(self.reasons).index(self.provider.name)]
        whys = ", ".join(f"{name} ({self.reasons[name]})" for name in before)
        return f"attention={self.provider.name} is taken; before it in the order: {whys}" if before else ""


def choose_attention(name: str, spec: AttentionSpec) -> Choice:
    """Returns the provider of this name, or for `auto` the first that can run; it has passed its test steps.
    Raises ConfigError if the named provider cannot run; the message lists those that can."""
    obstacles = {known: entry.why_not(spec) for known, entry in PROVIDERS.items()}
    passed_over = {known: why for known, entry in PROVIDERS.items() if (why := entry.only_by_name()) is not None}
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
    """Chooses one provider for all ranks: no rank uses a provider that another rank passes over. latest: this rank's
    index in the order -> the largest index of all ranks.

    Ranks with different providers would capture different steps, and then wait for each other forever.
    """
    choice, names = choose_attention(name, spec), list(PROVIDERS)
    common = names[latest(names.index(choice.provider.name))]
    return choice if common == choice.provider.name else choose_attention(common, spec)


def _why_it_fails(provider: AttentionProvider, spec: AttentionSpec) -> str | None:
    """Runs the test steps, except for the reference, which comes last in the order, and for ours on a CPU."""
    untried = UNTRIED_ON_CPU if spec.device.type == "cpu" else (REFERENCE,)
    return None if provider.name in untried else first_step.why_it_fails(provider, spec)
