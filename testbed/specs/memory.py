"""How much fits into a device's memory: one formula for both backends, and estimates of terms that are not measured."""

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
    """Returns how many KV blocks fit: `(memory x utilization - weights - activations - graphs) // block`. Used by both
    backends.

    graph_bytes: of captured steps; 0: none are captured. Raises DeviceError if not even one block fits.
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


def num_blocks_of_budget(cpu_kv_bytes: int, block_bytes: int, block_size: int) -> int:
    """Returns how many KV blocks fit into the budget of a CPU. Used by both backends. Raises DeviceError for none."""
    if cpu_kv_bytes < block_bytes:
        raise DeviceError(
            f"backend.cpu_kv_bytes is {cpu_kv_bytes:,}, but one KV block of {block_size} tokens takes "
            f"{block_bytes:,} bytes; raise it, set cache.num_gpu_blocks, or choose a smaller cache.block_size"
        )
    return cpu_kv_bytes // block_bytes


def activation_bytes(
    model: ModelSpec, max_num_batched_tokens: int, max_num_seqs: int, tensor_parallel_size: int = 1
) -> int:
    """Returns the estimated peak bytes of a step's temporaries on one rank at the scheduler's limits: hidden states,
    the MLP's inner row, logits.

    Every rank holds whole hidden states, and whole logits once they are gathered, but only its part of the inner row.
    """
    per_token = (4 + _copies(model)) * model.hidden_size + 3 * _inner_size(model, tensor_parallel_size)
    return model.activation_dtype_bytes * max_num_batched_tokens * per_token + 4 * max_num_seqs * model.vocab_size


def graph_bytes(model: ModelSpec, largest: int, tensor_parallel_size: int = 1) -> int:
    """Returns the estimated bytes that captured steps of up to `largest` tokens hold on one rank: the temporaries of
    the largest step, which the smaller ones share, and its result.

    The driver's memory for each graph is left out: an engine measures it, but no data sheet gives it.
    """
    per_token = (5 + _copies(model)) * model.hidden_size + 3 * _inner_size(model, tensor_parallel_size)
    return model.activation_dtype_bytes * largest * per_token


def _inner_size(model: ModelSpec, tensor_parallel_size: int) -> int:
    """Returns one rank's part of the MLP's inner row, or of the inner rows of a token's experts."""
    return -(-model.inner_size // tensor_parallel_size)


def _copies(model: ModelSpec) -> int:
    """Returns the hidden rows of a token that its experts output, before these are summed."""
    return 0 if model.experts is None else model.experts.per_token
