"""Our Triton kernels as a FakeGPU runs them: what is launched is checked, and computed in plain torch.

A check is what a GPU would answer with an error or with wrong numbers: tensors of the host, a grid that is too large,
number formats, strides that are not the tensors' own, blocks and slots that do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.real.fake_cuda import FakeGPU
from tests.real.fake_streams import DeviceTensor, Launch, TroubleError, leaves_of, mapped, place

MAX_GRID = (2**31 - 1, 65535, 65535)
FP8 = {2: torch.float8_e4m3fn, 3: torch.float8_e5m2}
SETTLED = 4  # is added to formats that a kernel reads
Values = dict[str, Any]


class Launcher:
    """Stands where a kernel stands in its module. writes: names of its arguments that it writes."""

    def __init__(self, gpu: FakeGPU, kernel: Any, writes: tuple[str, ...], compute: Callable[[Values], None]) -> None:
        self._gpu, self._kernel, self._writes, self._compute = gpu, kernel, writes, compute

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(
        self, grid: tuple[int, ...], *args: Any, num_warps: int, num_stages: int = 3, launch_pdl: bool = False,
        **named: Any,
    ) -> None:  # fmt: skip
        name = self._kernel.__name__
        if launch_pdl and not named.get("IS_CHAINED"):
            raise TroubleError(f"{name} starts before the kernel before it has ended, and does not wait for it")
        values = dict(zip(self._kernel.arg_names, args, strict=False)) | named
        if set(values) != set(self._kernel.arg_names) or len(values) != len(args) + len(named):
            raise TroubleError(f"{name} is launched with other arguments than it has")
        if any(not 1 <= size <= most for size, most in zip(grid, MAX_GRID, strict=False)):
            raise TroubleError(f"{name} is launched with a grid of {grid}")
        for key, value in values.items():
            if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) and not self._gpu.is_pinned(value):
                raise TroubleError(f"{key} of {name} lies on the host")
        inner = {key: value.inner if isinstance(value, DeviceTensor) else value for key, value in values.items()}
        work = partial(self._work, inner)
        tensors = {key: value for key, value in inner.items() if isinstance(value, Tensor)}
        reads = [value for key, value in tensors.items() if key not in self._writes]
        self._gpu.launch(Launch(name, reads, [tensors[key] for key in self._writes if key in tensors], work))
        work()

    def _work(self, values: Values) -> None:
        with torch.inference_mode(), _disable_current_modes():
            self._compute(values)


def must(holds: bool, what: str) -> None:
    if not holds:
        raise TroubleError(what)


def check_strides(values: Values, **strides: tuple[str, int]) -> None:
    """By the name of a stride: the tensor and the dimension that it belongs to."""
    for name, (tensor, dim) in strides.items():
        must(values[name] == values[tensor].stride(dim), f"{name} is not {tensor}'s")


def store(values: Values) -> None:
    keys, slots, cache = values["keys"], values["slots"], values["key_cache"]
    must(slots.dtype == torch.int64, "slots are 64 bits wide")
    check_strides(
        values, stride_key_token=("keys", 0), stride_key_head=("keys", 1), stride_value_token=("values", 0),
        stride_value_head=("values", 1), stride_block=("key_cache", 0), stride_slot=("key_cache", 1),
        stride_kv_head=("key_cache", 2),
    )  # fmt: skip
    must(slots.shape == keys.shape[:1] and int(slots.max()) < cache.shape[0] * cache.shape[1], "slots that exist")
    kept = slots >= 0
    for source, target, scale in (
        ("keys", "key_cache", "inverse_k_scale"),
        ("values", "value_cache", "inverse_v_scale"),
    ):
        new, old = values[source][kept], values[target]
        if values["KV_FORMAT"]:
            fp8 = FP8[values["KV_FORMAT"]]
            limit = torch.finfo(fp8).max
            new = (new.float() * values[scale]).clamp(-limit, limit).to(fp8).view(torch.uint8)
        must(new.dtype == old.dtype, "the cache has another format")
        old.view(-1, *old.shape[2:])[slots[kept]] = new


def heads(values: Values) -> None:
    """Turns queries and keys in place, stores keys and values."""
    for name in ("query", "key", "value"):
        check_strides(values, **{f"stride_{name}_token": (name, 0)})
        must(values[name].stride()[1:] == (2 * values["HALF"], 1), "the heads of a token lie side by side")
    must(values["HAS_NORM"] == (values["query_weight"] is not None), "what is normalised has weights")
    cos, sin = values["cos"], values["sin"]
    must(cos.shape == sin.shape == (len(values["query"]), 1, values["HALF"]), "an angle for each pair of each token")
    for name in ("query", "key"):
        x, weight = values[name], values[f"{name}_weight"]
        turned = x if weight is None else torch.nn.functional.rms_norm(x, weight.shape, weight, values["eps"])
        first, second = turned.chunk(2, dim=-1)
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    strides = {
        f"stride_{name}_{unit}": values[name].stride(dim)
        for name in ("key", "value")
        for dim, unit in enumerate(("token", "head"))
    }
    store(values | strides | {"keys": values["key"], "values": values["value"]})


def read_keys(values: Values, row: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Keys and values at positions first … last - 1 of a row, float32 [n, num_kv_heads, head_dim], unscaled."""
    tables, size = values["tables"], values["BLOCK_SIZE"]
    must(tables.dtype == torch.int32 and tables.stride(1) == 1, "block tables are rows of 32 bits")
    positions = torch.arange(first, last)
    blocks = tables[row, positions // size].long()
    must(not len(blocks) or (int(blocks.min()) >= 0 and int(blocks.max()) < len(values["keys"])), "blocks that exist")
    found = []
    for name in ("keys", "values"):
        read = values[name][blocks, positions % size]
        if (kv_format := values["KV_FORMAT"] % SETTLED) > 1:
            read = read.view(FP8[kv_format]).float() / (256.0 if kv_format == 2 else 1.0)
        found.append(read.float())
    return found[0], found[1]


def attend(values: Values, row: int, token: int, position: int) -> None:
    """Fills the output of one token, which is at this position of its row."""
    from real.kernels.formats import QUERY_FACTOR

    first = max(0, position + 1 - values["window"]) if values["HAS_WINDOW"] else 0
    keys, read = read_keys(values, row, first, position + 1)
    query = values["query"][token].float()
    if values["KV_FORMAT"] and values["query"].dtype == torch.bfloat16:
        query *= QUERY_FACTOR.value
    group = query.shape[0] // keys.shape[1]
    keys, read = keys.repeat_interleave(group, 1), read.repeat_interleave(group, 1)
    scores = torch.einsum("hd,phd->hp", query, keys) * (values["qk_scale"] * math.log(2))
    if values["HAS_ALIBI"]:
        scores = scores + values["slopes"][:, None] * (torch.arange(first, position + 1) - position)
    weights = scores.softmax(-1) if position >= 0 else scores
    output = torch.einsum("hp,phd->hd", weights, read) * values["value_scale"]
    values["output"][token] = output.to(values["output"].dtype)


def check_attention(values: Values) -> None:
    check_strides(
        values, stride_query_token=("query", 0), stride_query_head=("query", 1), stride_output_token=("output", 0),
        stride_output_head=("output", 1), stride_block=("keys", 0), stride_slot=("keys", 1),
        stride_kv_head=("keys", 2), stride_table=("tables", 0),
    )  # fmt: skip
    must(values["query"].stride(2) == values["output"].stride(2) == 1, "the elements of a head lie side by side")
    must(values["query"].dtype == values["output"].dtype, "query and output have one format")
    must(values["context_lens"].dtype == torch.int32, "context lengths are 32 bits wide")


def decode(values: Values) -> None:
    """Also of a split context: the partial results are left out, and the second kernel has nothing to do."""
    check_attention(values)
    for name in ("partial", "items"):
        must(values["IS_SPLIT"] == (values[name] is not None), f"parts of contexts have {name}")
    lens = values["context_lens"].tolist()
    for row, (token, num) in enumerate(token_and_queries(values, len(lens))):
        if num == 1:
            attend(values, row, token, lens[row] - 1)


def token_and_queries(values: Values, num_rows: int) -> list[tuple[int, int]]:
    """Of each row its first token, and how many it has."""
    starts = values["query_starts"]
    must(values["IS_MIXED"] == (starts is not None), "rows of a mixed step have starts")
    if starts is None:
        return [(row, 1) for row in range(num_rows)]
    must(starts.dtype == torch.int32 and len(starts) == num_rows + 1, "starts are 32 bits wide")
    return list(zip(starts.tolist(), starts.diff().tolist(), strict=False))


def plan(values: Values) -> None:
    """Every decode is one part."""
    items, starts, num_rows = values["items"], values["starts"], values["num_rows"]
    must(items.dtype == starts.dtype == torch.int32, "parts are 32 bits wide")
    must(items.shape == (values["num_items"], 4) and starts.shape == (num_rows + 1,), "parts of all rows")
    is_decode = [num == 1 for _, num in token_and_queries(values, num_rows)]
    found = [[row, 0, 1, 2**30] for row in range(num_rows) if is_decode[row]]
    must(values["num_items"] >= len(found), "a part for each row")
    items.fill_(-1)
    items[: len(found)] = torch.tensor(found, dtype=torch.int32).view(-1, 4)
    starts.copy_(torch.tensor([0, *accumulate(is_decode)]))


def reduce(values: Values) -> None:
    must(values["partial"].dtype == torch.float32, "partial results are float32")


def lay_out(values: Values) -> None:
    """Tiles in the order of their rows: which comes first changes no result."""
    starts, lens, tiles = values["query_starts"], values["context_lens"], values["tiles"]
    must(starts.dtype == lens.dtype == tiles.dtype == torch.int32, "tiles are 32 bits wide")
    found = []
    for row, (num, context) in enumerate(zip(starts.diff().tolist(), lens.tolist(), strict=True)):
        if num > 1 and not (values["SKIPS_FRESH"] and num == context):
            found += [[row, first] for first in range(0, num, values["TOKENS"])]
    must(len(found) <= len(tiles), "room for all tiles")
    tiles[: len(found)] = torch.tensor(found, dtype=torch.int32).view(-1, 2)


def prefill(values: Values) -> None:
    check_attention(values)
    starts, tiles = values["query_starts"], values["tiles"]
    must(starts.dtype == tiles.dtype == torch.int32, "tiles are 32 bits wide")
    for row, first in (tile for tile in tiles.tolist() if tile[0] >= 0):
        begin, num = int(starts[row]), int(starts[row + 1] - starts[row])
        before = int(values["context_lens"][row]) - num
        for query in range(first, min(first + values["BLOCK_M"] // values["GROUP"], num)):
            attend(values, row, begin + query, before + query)


def move(values: Values) -> None:
    target, source, pairs = values["target"], values["source"], values["pairs"]
    check_strides(values, stride_target_plane=("target", 0), stride_source_plane=("source", 0))
    must(pairs.dtype == torch.int64 and pairs.is_contiguous(), "pairs are 64 bits wide, side by side")
    chunks = -(-values["WORDS"] // values["CHUNK"])
    must(values["num_items"] == len(pairs) * values["PLANES"] * chunks, "all of all pairs is moved")
    must((values["PLANES"], values["WORDS"]) == (len(source), source.shape[2]), "all of all planes is moved")
    if place(target) == place(source):
        read, written = (set(blocks) for blocks in pairs.T.tolist())
        must(not read & written, "a block is read and written in no particular order")
    target[:, pairs[:, 1]] = source[:, pairs[:, 0]]


def scaled(values: Values) -> Tensor:
    """The logits of each draw, over its temperature, largest 0: float32 [n, vocab]."""
    rows, logits = values["rows"], values["logits"]
    check_strides(values, stride_row=("logits", 0))
    must(rows.dtype == torch.int64 and int(rows.max()) < len(logits), "rows that exist")
    must(logits.dtype == torch.float32 and logits.shape[1] == values["vocab_size"], "logits of the vocabulary")
    chosen = logits[rows]
    return (chosen - chosen.amax(-1, keepdim=True)) / values["temperatures"].clamp(min=1e-30)[:, None]


def largest_logits(values: Values) -> None:
    """Read again by those who need it."""
    values["largest"].zero_()


def least_logits(values: Values) -> None:
    from real.sampling.shaping import Filters, filter_

    must(values["top_k"].dtype == torch.int64, "top-k is 64 bits wide")
    chosen = scaled(values)
    filter_(chosen, Filters(values["log_min_p"], values["top_k"], values["top_p"]), values["vocab_size"])
    values["least"].copy_(chosen.masked_fill(chosen.isneginf(), 0.0).amin(-1))


def race(values: Values) -> None:
    """Part 0 has them all."""
    from real.sampling.noise import log_exponential

    must(values["IS_FILTERED"] == (values["least"] is not None), "what is filtered has a least logit")
    must(values["keys"].dtype == torch.int64, "keys are 64 bits wide")
    chosen = scaled(values)
    if values["least"] is not None:
        chosen.masked_fill_(chosen < values["least"][:, None], -math.inf)
    chosen -= log_exponential(values["keys"], values["vocab_size"])
    values["scores"].fill_(-math.inf)
    values["scores"][:, 0], values["winners"][:, 0] = chosen.amax(-1), chosen.argmax(-1).int()


def pick(values: Values) -> None:
    must(int(values["targets"].max()) < len(values["token_ids"]), "places that exist")
    winners, scores = values["winners"], values["scores"]
    values["token_ids"][values["targets"]] = winners.gather(1, scores.argmax(-1, keepdim=True))[:, 0].long()


def on_gpu(gpu: FakeGPU, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of another package that is one launch: its tensors must lie on the GPU, and so does its result."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
        must(all(isinstance(tensor, DeviceTensor) for tensor in tensors), f"{function.__name__} of the host's tensors")
        inner = mapped(lambda leaf: leaf.inner if isinstance(leaf, Tensor) else leaf, (args, kwargs))

        def work() -> Tensor:
            with torch.inference_mode(), _disable_current_modes():
                return function(*inner[0], **inner[1])

        result = work()
        output = gpu.put(result)
        reads = [tensor.inner for tensor in tensors]
        gpu.launch(Launch(function.__name__, reads, [result], lambda: result.copy_(work())))
        return output

    return call
