"""Hand-made plans: what the core would decide, laid out by a few lines so that these tests need no core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from real.backend import RealBackend
from real.checkpoint import make_checkpoint
from real.config import EngineOptions, RealConfig
from real.parallel.group import SINGLE
from real.sampling.inputs import SampleInputs
from real.sampling.sampler import choose
from testbed.core.plan import BatchPlan, BatchShape, PrefillChunk, ScheduledSequence
from testbed.core.request import GREEDY, Request, SamplingParams
from testbed.errors import ModelError
from testbed.made_rows import MadeRows
from testbed.specs.model import ModelSpec, RopeScaling

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

TOLERANCE = 1e-5  # absolute, on float32 logits of unit scale: sums taken in another order, nothing more


LLAMA: dict[str, object] = {"architecture": "LlamaForCausalLM"}
OPT: dict[str, object] = {
    "architecture": "OPTForCausalLM", "num_key_value_heads": 4, "hidden_act": "relu", "attention_bias": True,
    "mlp_bias": True,
}  # fmt: skip


def tiny_spec(**changes: object) -> ModelSpec:
    values: dict[str, object] = {
        "name": "tiny-test", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
        "max_position_embeddings": 256, "dtype": "float32", "rope_theta": 10_000.0,
    }  # fmt: skip
    return ModelSpec(**{**values, **changes})  # type: ignore[arg-type]


EXPERTS: dict[str, object] = {
    "architecture": "Qwen3MoeForCausalLM", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip


ARCHITECTURES: dict[str, dict[str, object]] = {  # changes of tiny_spec
    "qwen3": {},
    "qwen3 untied": {"tie_word_embeddings": False, "attention_bias": True},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen2 untied": {"architecture": "Qwen2ForCausalLM", "tie_word_embeddings": False, "num_key_value_heads": 1},
    "qwen3 moe": EXPERTS,
    "qwen3 moe untied": {**EXPERTS, "tie_word_embeddings": False, "norm_topk_prob": False, "num_experts_per_tok": 5},
    "llama": {**LLAMA, "tie_word_embeddings": False},
    "llama with biases": {**LLAMA, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "llama linear": {**LLAMA, "rope_scaling": RopeScaling("linear", 4.0)},
    "llama dynamic": {**LLAMA, "rope_scaling": RopeScaling("dynamic", 2.0)},
    "llama llama3": {**LLAMA, "rope_scaling": RopeScaling("llama3", 8.0, 32)},
    "llama yarn": {**LLAMA, "rope_scaling": RopeScaling("yarn", 4.0, 16)},
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": 9, "num_key_value_heads": 1, "head_dim": 20},
    "opt": OPT,
    "opt normalised after": {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
}


CONFIG_KEYS = (
    "attention", "load_format", "dtype", "cpu_kv_bytes", "k_scale", "v_scale", "cuda_graphs", "max_captured_tokens",
)  # fmt: skip


def tiny_backend(spec: ModelSpec | None = None, *, block_size: int = 4, device: str = "cpu", **options) -> RealBackend:
    config = {key: options.pop(key) for key in CONFIG_KEYS if key in options}
    spec, group = spec or tiny_spec(), options.pop("group", SINGLE)
    options = {"num_gpu_blocks": 64, "num_cpu_blocks": 16, "max_num_batched_tokens": 64, "max_num_seqs": 8} | options
    engine = EngineOptions(block_size, max_model_len=options.pop("max_model_len", None) or spec.max_length, **options)
    return RealBackend(spec, RealConfig(device=device, **config), engine, group)


def row(
    seq_id: int, tokens: Sequence[int], table: Sequence[int], *, start: int = 0, end: int | None = None,
    samples: bool = True, forced: bool = False, sampling: SamplingParams = GREEDY,
) -> ScheduledSequence:  # fmt: skip
    """The step that computes positions start … end - 1 of a sequence whose known tokens are `tokens`."""
    part = tokens[start:end]
    return ScheduledSequence(seq_id, start, len(part), part, samples, forced, table, sampling)


def requests_of(kinds: Sequence[Mapping[str, Any]], prompts: Sequence[list[int]], num_tokens: int) -> list[Request]:
    """One of each prompt, a millisecond apart, of the kinds in turn."""
    return [
        Request(
            f"r{i}",
            prompt,
            arrival_ns=1_000_000 * i,
            sampling=SamplingParams(max_tokens=num_tokens, seed=i, **kinds[i % len(kinds)]),
        )
        for i, prompt in enumerate(prompts)
    ]


def plan_of(*rows: ScheduledSequence, **moves: tuple[tuple[int, int], ...]) -> BatchPlan:
    prefills = tuple(PrefillChunk(r.start, r.num_tokens) for r in rows if r.num_tokens > 1)
    decodes = [r for r in rows if r.num_tokens == 1]
    context = sum(r.start + 1 for r in decodes)
    shape = BatchShape(len(decodes), context, prefills, sum(r.samples for r in rows))
    return BatchPlan(0, shape, MadeRows(rows), **moves)


def step_logits(backend: RealBackend, *rows: ScheduledSequence, **moves: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Logits of the rows that sample, [num_samples, vocab], after the plan's block moves."""
    with torch.inference_mode():
        backend.cache.execute(plan_of(*rows, **moves))
        inputs = backend.runner.prepare(rows)
        hidden = backend.runner.hidden_states(inputs, backend.cache.gpu)
        logits = backend.runner.token_logits(hidden, inputs.sample_tokens)
    if logits.is_cuda:  # as every step is waited for: the next one's inputs take the place of this one's
        torch.cuda.synchronize()
    return logits


PIECES = [3, 500, 17, 256, 255, 1, 499, 88, 9]  # a prompt


def logits_of_pieces(spec: ModelSpec, **options: Any) -> torch.Tensor:
    """Of a prefill in two chunks and a decode, [2, vocab]."""
    backend, table = tiny_backend(spec, sliding_window=spec.sliding_window, **options), [9, 3, 17]
    step_logits(backend, row(0, PIECES, table, end=5, samples=False))
    prefill = step_logits(backend, row(0, PIECES, table, start=5))
    return torch.cat([prefill, step_logits(backend, row(0, [*PIECES, 4], table, start=len(PIECES)))])


def load_error(spec: ModelSpec, **options: Any) -> str:
    """The line that says why no engine is made."""
    with pytest.raises(ModelError) as error:
        tiny_backend(spec, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def checkpoint(folder: Path, spec: ModelSpec) -> ModelSpec:
    """The spec, now with the path of a fresh random checkpoint of its shape."""
    path = make_checkpoint(folder / spec.name, spec, seed=11)
    return ModelSpec(**{name: getattr(spec, name) for name in ModelSpec.__dataclass_fields__} | {"path": str(path)})


def drawn_by_row(logits: torch.Tensor, inputs: SampleInputs) -> list[tuple[int, ...]]:
    """The draws of each row, from logits [num_rows, vocab]."""
    token_ids = choose(logits, inputs).tolist()
    return [tuple(token_ids[place] for place in (row, *forks)) for row, forks in enumerate(inputs.forks)]
