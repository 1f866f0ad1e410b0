"""What fits into a device's memory: one formula, which both backends ask, and estimates for what is not measured."""

from __future__ import annotations

from testbed.errors import DeviceError
from testbed.specs.model import ModelSpec


def num_kv_blocks(
    *,
    memory_bytes: int,
    utilization: float,
    weight_bytes: int,
    activation_bytes: int,
    block_bytes: int,
    graph_bytes: int = 0,
) -> int:
    """How many KV blocks fit: `(memory x utilization - weights - activations - graphs) // block`. Both backends ask
    here.

    graph_bytes: of captured steps; 0: none are captured. Raises DeviceError if not even one fits.
    """
    usable = int(memory_bytes * utilization) - weight_bytes - activation_bytes - graph_bytes
    num_blocks = usable // block_bytes
    if num_blocks < 1:
        raise DeviceError(
            f"no room for one KV block of {block_bytes:,} bytes: {memory_bytes:,} bytes x {utilization} utilization - "
            f"{weight_bytes:,} weights - {activation_bytes:,} activations - {graph_bytes:,} captured graphs = "
            f"{usable:,}; "
            "raise cache.gpu_memory_utilization or device.tensor_parallel_size, or choose a smaller model"
        )
    return int(num_blocks)


def activation_bytes(
    model: ModelSpec, max_num_batched_tokens: int, max_num_seqs: int, tensor_parallel_size: int = 1
) -> int:
    """The peak of a step's temporaries on one rank at the maximum load, estimated: hidden states, the MLP's inner row,
    logits.

    Hidden states are whole on every rank, and so are the logits once they are gathered; the inner row is shared out.
    """
    per_token = (4 + _copies(model)) * model.hidden_size + 3 * _inner_size(model, tensor_parallel_size)
    return model.activation_dtype_bytes * max_num_batched_tokens * per_token + 4 * max_num_seqs * model.vocab_size


def graph_bytes(model: ModelSpec, largest: int, tensor_parallel_size: int = 1) -> int:
    """What captured steps of up to `largest` tokens hold on one rank, estimated: the temporaries of the largest, in
    which the smaller ones work too, and their result.

    What the driver keeps of each graph, which an engine measures, is left out: no data sheet says it.
    """
    per_token = (5 + _copies(model)) * model.hidden_size + 3 * _inner_size(model, tensor_parallel_size)
    return model.activation_dtype_bytes * largest * per_token


def _inner_size(model: ModelSpec, tensor_parallel_size: int) -> int:
    """One rank's part of the MLP's inner row, or of those of a token's experts."""
    return -(-model.inner_size // tensor_parallel_size)


def _copies(model: ModelSpec) -> int:
    """Hidden rows of a token that its experts give, before they are summed."""
    return 0 if model.experts is None else model.experts.per_token
