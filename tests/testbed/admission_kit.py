"""Sequences and blocks as admission policies see them, settable."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from testbed.policies.admission import (
    NoEvict,
)
from testbed.policies.oracle import NoOracle

LIMITS = SimpleNamespace(max_model_len=512)


@dataclass(eq=False)
class Seq:
    """What a policy may read of a sequence, settable. A group's first member lists all of them in `members`."""

    seq_id: int
    num_prompt_tokens: int
    max_tokens: int | None = 4
    num_output_tokens: int = 0
    num_slots: int = 0
    num_seqs: int = 1
    members: list[Seq] = field(default_factory=list)
    request_id: str = ""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def together(self) -> list[Seq]:
        return self.members or [self]

    @property
    def request(self) -> Any:
        return SimpleNamespace(
            request_id=self.request_id or str(self.seq_id), sampling=SimpleNamespace(max_tokens=self.max_tokens)
        )


@dataclass
class Blocks:
    """What a policy may ask of the block manager."""

    num_gpu_blocks: int
    block_size: int = 4
    num_free_blocks: int = 0
    lookahead_slots: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)
    hits: dict[int, int] = field(default_factory=dict)  # cached blocks of a waiting sequence
    num_unreferenced: int = 0

    def table(self, seq_id: int) -> list[int]:
        return self.tables[seq_id]

    def lookup(self, seq: Seq) -> Any:
        num_blocks = self.hits.get(seq.seq_id, 0)
        return SimpleNamespace(blocks=[0] * num_blocks, num_unreferenced=self.num_unreferenced)


class Says:
    """An oracle that gives the same answer to every question about a sequence."""

    def __init__(self, lengths: dict[int, int]) -> None:
        self.lengths = lengths

    def predict(self, seq: Seq) -> int | None:
        return self.lengths.get(seq.seq_id)


def bound(policy: Any, blocks: Blocks, oracle: Any = None) -> Any:
    policy.bind(SimpleNamespace(blocks=blocks, limits=LIMITS, oracle=oracle or NoOracle(), estimator=None, seed=0))
    return policy


def allows(policy: NoEvict, seq: Any, running: Collection[Any]) -> bool:
    return policy.allows(seq, running)
