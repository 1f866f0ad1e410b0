"""The two ends of a language model: token ids to vectors, and vectors to logits over the vocabulary.

Under tensor parallelism the vocabulary is what is sharded, in both.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from real.device import Placement
from real.layers.linear import empty_parameter


class VocabEmbedding(nn.Module):
    """Token ids [num_tokens] -> [num_tokens, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.weight = empty_parameter((vocab_size, hidden_size), placement)

    def forward(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)


class LMHead(nn.Module):
    """Hidden states of the rows that sample [num_rows, hidden] -> logits [num_rows, vocab], always float32.

    tied_to: the embedding whose weight it shares, if the model ties them.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, placement: Placement, tied_to: VocabEmbedding | None = None
    ) -> None:
        super().__init__()
        self.weight = tied_to.weight if tied_to is not None else empty_parameter((vocab_size, hidden_size), placement)

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight).float()
