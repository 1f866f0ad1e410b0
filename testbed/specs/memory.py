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
    per_token = _token_bytes(model, 4, tensor_parallel_size)
    return max_num_batched_tokens * per_token + 4 * max_num_seqs * model.vocab_size


def graph_bytes(model: ModelSpec, largest: int, tensor_parallel_size: int = 1) -> int:
    """Returns the estimated bytes that captured steps of up to `largest` tokens hold on one rank: the temporaries of
    the largest step, which the smaller ones share, and its result.

    The driver's memory for each graph is left out: an engine measures it, but no data sheet gives it.
    """
    return largest * _token_bytes(model, 5, tensor_parallel_size)


def _token_bytes(model: ModelSpec, num_hidden: int, tensor_parallel_size: int) -> int:
    """Returns the bytes of one token's temporaries on one rank: `num_hidden` hidden rows and those that its experts
    output before these are summed, and three of the MLP's inner row, or of the inner rows of its experts."""
    num_rows = num_hidden + (0 if model.experts is None else model.experts.per_token)
    inner_size = -(-model.inner_size // tensor_parallel_size)
    return model.activation_dtype_bytes * (num_rows * model.hidden_size + 3 * inner_size)
