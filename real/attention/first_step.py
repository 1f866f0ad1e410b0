"""Two small test steps, before a model is loaded. Some faults of a provider show only on the device: a compiler's
missing header, a binary for other GPUs, a kernel that needs too much of a multiprocessor, wrong numbers. The test turns
them into a reason against the provider instead of a later traceback. It compiles kernels that the engine needs anyway.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from real.attention.interface import AttentionMetadata, AttentionProvider, AttentionSpec, metadata_of, quantize
from real.attention.torch_provider import TorchAttention
from real.device import is_out_of_memory
from testbed.errors import DeviceError

LIMIT = 0.05  # of the largest absolute value of a token's output; errors of half precision are a tenth of that
MAX_MESSAGE = 200  # characters; messages of compilers are longer
PROMPT, CHUNK, SHORT, LONG = (20, 20), (5, 45), (1, 18), (1, 700)  # (new tokens, context): a row of each kind


# what a layer passes to attention (query, key, value, KV memory), and the step's metadata
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, AttentionMetadata]


@torch.inference_mode()
def why_it_fails(provider: AttentionProvider, spec: AttentionSpec) -> str | None:
    """Why a provider fails at a step with all kinds of rows or at one with decodes only; None if its outputs are those
    of the reference. Raises DeviceError if a GPU does not answer any more."""
    reference = TorchAttention(spec)
    for rows in ([PROMPT, CHUNK, SHORT, LONG], [SHORT, LONG]):
        inputs = _inputs(spec, rows)
        try:
            output = _run(provider, inputs)
        except AssertionError:  # a bug of our own
            raise
        except Exception as error:
            if is_out_of_memory(error):  # which is no fault of the provider
                raise
            _check_answers(spec.device, provider.name, error)
            told = " ".join(str(error).split())
            short = told if len(told) <= MAX_MESSAGE else f"{told[:MAX_MESSAGE]} …"
            return f"it failed at a first small step ({type(error).__name__}: {short})"
        del inputs  # the device may have no memory for both
        with sdpa_kernel(SDPBackend.MATH):  # plain matrix multiplications, which every device has
            expected = _run(reference, _inputs(spec, rows))  # new inputs: a wrong provider may have overwritten the old
        largest, off = (each.abs().flatten(1).amax(1) for each in (expected, output - expected))  # per token
        is_right = off <= LIMIT * largest
        if not is_right.all():
            worst = int(torch.nan_to_num(off / largest, nan=torch.inf).argmax())
            return (
                f"its output of a first small step is {off[worst].item():.3g} off the reference's, which goes up to "
                f"{largest[worst].item():.3g}"
            )
    return None


def _check_answers(device: torch.device, name: str, error: Exception) -> None:
    """Raises DeviceError if the error has left the GPU unusable: then no other provider can be tried on it."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        first = str(error).partition("\n")[0]
        raise DeviceError(
            f"the GPU does not answer after a first small step of attention={name} ({first}); choose another "
            "backend.attention"
        ) from None


def _run(provider: AttentionProvider, inputs: Inputs) -> Tensor:
    """Returns the step's output in float32 on the host. The copy waits, so the device's errors are raised here."""
    query, key, value, kv_cache, metadata = inputs
    return provider.prepare(metadata)(query, key, value, kv_cache).float().cpu()


def _inputs(spec: AttentionSpec, rows: list[tuple[int, int]]) -> Inputs:
    """Returns the inputs of random sequences, each in its own KV blocks; equal rows give equal inputs."""
    generator = torch.Generator().manual_seed(0)
    size, device = spec.block_size, spec.device
    num_blocks = [-(-context // size) for _, context in rows]
    tables = np.zeros((len(rows), max(num_blocks)), dtype=np.int32)
    for table, end, num in zip(tables, accumulate(num_blocks), num_blocks, strict=True):
        table[:num] = np.arange(end - num, end)
    slots = [
        int(table[position // size]) * size + position % size
        for table, (num, context) in zip(tables, rows, strict=True)
        for position in range(context - num, context)
    ]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    kv_shape = (spec.num_kv_heads, spec.head_dim)
    cache = normal(2, sum(num_blocks), size, *kv_shape)
    if spec.kv_dtype != "auto":
        scaled = [quantize(cache[i], scale, spec.cache_dtype) for i, scale in enumerate((spec.k_scale, spec.v_scale))]
        cache = torch.stack([part.view(torch.uint8) for part in scaled]).view(spec.cache_dtype)
    cache = cache.to(device, spec.cache_dtype)
    query = normal(len(slots), spec.num_heads, spec.head_dim).to(device, spec.dtype)
    key, value = normal(2, len(slots), *kv_shape).to(device, spec.dtype)
    metadata = metadata_of(rows, torch.tensor(slots, device=device), torch.from_numpy(tables).to(device))
    return query, key, value, cache, metadata
