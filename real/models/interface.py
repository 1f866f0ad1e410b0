"""What the runner asks of a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from torch import Tensor, nn

from real.attention.interface import StepAttention


class CausalLM(nn.Module):
    """A decoder-only language model over flat batches."""

    @abstractmethod
    def hidden_states(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Iterable[Tensor], attention: StepAttention
    ) -> Tensor:
        """Ids and positions [num_tokens], one KV tensor a layer -> final hidden states [num_tokens, hidden]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of the rows that sample [num_rows, hidden] -> float32 [num_rows, vocab]."""
