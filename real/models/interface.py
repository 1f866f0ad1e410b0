"""The interface between the runner and a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from real.attention.interface import StepAttention


class CausalLM(nn.Module):
    """A decoder-only language model over flat batches. lm_head: computes logits from the decoder's hidden states."""

    def __init__(self, model: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.model, self.lm_head = model, lm_head

    def hidden_states(
        self, token_ids: Tensor, positions: Tensor, kv_caches: Iterable[Tensor], attention: StepAttention
    ) -> Tensor:
        """Ids and positions [num_tokens], one KV tensor per layer -> final hidden states [num_tokens, hidden]."""
        hidden: Tensor = self.model(token_ids, positions, kv_caches, attention)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states of the rows that sample [num_rows, hidden] -> float32 [num_rows, vocab]."""
        logits: Tensor = self.lm_head(hidden)
        return logits
