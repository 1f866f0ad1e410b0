"""Ranks that share a model compute what one rank computes: weights, embeddings, attention, logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from real.loader import checkpoint_slots
from testbed.errors import ConfigError
from testbed.specs.memory import activation_bytes, graph_bytes
from tests.real.engine_helpers import ARCHITECTURES, PIECES, checkpoint, row, step_logits, tiny_backend, tiny_spec
from tests.real.thread_ranks import check_ranks_agree, on_ranks

SHAPES = {
    "heads of both kinds": (2, {}),
    "a KV head on both ranks": (2, {"num_key_value_heads": 1}),
    "a KV head on two of four ranks": (4, {}),
    "a vocabulary that does not divide": (2, {"vocab_size": 509}),
    "a rank beside the vocabulary": (4, {"vocab_size": 501, "tie_word_embeddings": False}),
    "untied": (2, {"vocab_size": 509, "tie_word_embeddings": False}),
}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_shared(name, num_ranks):
    check_ranks_agree(tiny_spec(**ARCHITECTURES[name], vocab_size=509), num_ranks)


@pytest.mark.parametrize(("num_ranks", "changes"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("from_file", [True, False], ids=["safetensors", "dummy"])
def test_ranks_together_give_the_logits_of_one(tmp_path, num_ranks, changes, from_file):
    spec = tiny_spec(**changes)
    check_ranks_agree(checkpoint(tmp_path, spec) if from_file else spec, num_ranks)


def test_ranks_hold_no_more_than_their_part():
    one = tiny_backend().runner.model
    shared = on_ranks(2, lambda rank: tiny_backend(group=rank).runner.model)
    whole = {name: slot.view for name, slot in checkpoint_slots(one).items()}
    for name, full in whole.items():
        parts = [checkpoint_slots(model)[name].view for model in shared]
        if full.dim() == 1:
            assert all(torch.equal(part, full) for part in parts)
        else:
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            assert torch.equal(torch.cat(parts, dim), full)


@pytest.mark.parametrize(("num_ranks", "what"), [(3, "4 attention heads"), (4, "intermediate_size")])
def test_a_model_that_does_not_divide_is_refused(num_ranks, what):
    with pytest.raises(ConfigError, match=what):
        on_ranks(num_ranks, lambda rank: tiny_backend(replace(tiny_spec(), intermediate_size=98), group=rank))


def test_experts_that_do_not_divide_are_refused():
    spec = tiny_spec(**{**ARCHITECTURES["qwen3 moe"], "moe_intermediate_size": 25})
    with pytest.raises(ConfigError, match=r"it must divide the moe_intermediate_size \(25\)"):
        on_ranks(2, lambda rank: tiny_backend(spec, group=rank))


def test_what_the_ranks_share_of_a_steps_rows_is_what_the_memory_is_counted_by():
    """The rows on the way: an MLP's inner row is shared out; hidden states, and logits once gathered, are whole."""

    def widths(group=None) -> dict[str, set[int]]:
        backend = tiny_backend(spec, **({} if group is None else {"group": group}))
        found: dict[str, set[int]] = {"gate_up_proj": set(), "down_proj": set(), "lm_head": set()}
        for name, module in backend.runner.model.named_modules():
            if (last := name.rpartition(".")[2]) in found:
                module.register_forward_hook(lambda _, __, out, last=last: found[last].add(out.shape[-1]))
        step_logits(backend, row(0, PIECES, [9, 3, 17]))
        return found

    spec = tiny_spec(vocab_size=509)
    per_token = [activation_bytes(spec, 1, 0, size) // spec.activation_dtype_bytes for size in (1, 2)]
    for size, found in ((1, widths()), *((2, found) for found in on_ranks(2, widths))):
        inner = spec.intermediate_size // size
        assert found == {"gate_up_proj": {2 * inner}, "down_proj": {spec.hidden_size}, "lm_head": {509}}
        assert per_token[size - 1] == 4 * spec.hidden_size + 3 * inner
    assert per_token[0] - per_token[1] == graph_bytes(spec, 1) // 4 - graph_bytes(spec, 1, 2) // 4
