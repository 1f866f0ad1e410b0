"""The two ends of a language model: token ids to vectors, and vectors to logits over the vocabulary.

Under tensor parallelism both are split over the ranks by vocabulary, padded to a multiple of the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from real.device import Placement
from real.layers.linear import multiply
from real.layers.slots import Slot, empty_parameter, shared


class VocabParallel(nn.Module):
    """The rows `start` … `start + num_rows - 1` of a matrix [vocab, hidden]; rows beyond the vocabulary are zeros."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.group = placement.group
        self.vocab_size = vocab_size
        self.num_rows = -(-vocab_size // self.group.size)
        self.start = min(self.group.rank * self.num_rows, vocab_size)
        self.num_used = min(self.num_rows, vocab_size - self.start)
        self.weight = empty_parameter((self.num_rows, hidden_size), placement)
        self.weight.data[self.num_used :].zero_()

    def slots(self, name: str, parameter: Tensor) -> Mapping[str, Slot]:
        return {"": shared(parameter[: self.num_used], 0, self.start, self.vocab_size)}


class VocabEmbedding(VocabParallel):
    """Token ids [num_tokens] -> [num_tokens, hidden]. Each rank embeds the ids of its rows; the results are summed."""

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return functional.embedding(token_ids, self.weight)
        rows = token_ids - self.start
        is_elsewhere = (rows < 0) | (rows >= self.num_rows)
        vectors = functional.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return self.group.all_reduce(vectors.masked_fill(is_elsewhere[:, None], 0))


class LMHead(VocabParallel):
    """Hidden states of the rows that sample [num_rows, hidden] -> logits [num_rows, vocab], always float32, on every
    rank.

    tied_to: the embedding whose weight it shares, if the model ties them.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, placement: Placement, tied_to: VocabEmbedding | None = None
    ) -> None:
        super().__init__(vocab_size, 0 if tied_to is not None else hidden_size, placement)
        if tied_to is not None:
            self.weight = tied_to.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits = multiply(hidden, self.weight)  # [num_rows, vocab / ranks]
        if self.group.size > 1:
            logits = self.group.all_gather(logits)[:, : self.vocab_size]
        return logits.float()
