"""Inputs of sampling that are kept from step to step are those that a step would make by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from real.sampling import feed
from real.sampling.feed import SampleFeed
from real.sampling.inputs import Source, sample_inputs
from testbed.core.plan import ScheduledSequence
from testbed.core.request import GREEDY, SamplingParams

VOCAB_SIZE = 40
SOURCE = Source(VOCAB_SIZE, 3, eos_token_id=2)
RANDOM = SamplingParams(temperature=0.7)
KINDS = [
    GREEDY, RANDOM, SamplingParams(temperature=1.0, seed=4, top_p=0.5), SamplingParams(temperature=2.0, top_k=3, n=2),
    SamplingParams(temperature=1.0, logit_bias={1: 2.0}), SamplingParams(logprobs=2), SamplingParams(min_tokens=3),
    SamplingParams(temperature=1.0, presence_penalty=1.0), SamplingParams(prompt_logprobs=1),
    SamplingParams(beam_width=2),
]  # fmt: skip


def line(seq_id: int, start: int, sampling: SamplingParams, **options: Any) -> ScheduledSequence:
    known = [(seq_id + i) % VOCAB_SIZE for i in range(start + 2)]
    num_tokens = options.pop("num_tokens", 1)
    num_known = start + num_tokens if sampling.is_penalised else max(start + num_tokens, 3)
    options = {"group_id": seq_id, "num_prompt_tokens": 3, "history": known[:num_known]} | options
    return ScheduledSequence(
        seq_id, start, num_tokens, known[start : start + num_tokens], options.pop("samples", True),
        options.pop("forced", False), [0], sampling, **options,
    )  # fmt: skip


def flat(item: Any) -> Any:
    """As plain values, which can be compared."""
    if isinstance(item, torch.Tensor | np.ndarray):
        return (item.cpu() if isinstance(item, torch.Tensor) else item).tolist()
    return tuple(flat(part) for part in item) if isinstance(item, tuple | list) else item


ROW = st.tuples(
    st.integers(0, 4), st.integers(1, 6), st.sampled_from(KINDS), st.booleans(), st.booleans(), st.integers(1, 2)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.lists(ROW, min_size=1, max_size=4), st.integers(0, 2)), min_size=1, max_size=4))
def test_every_step_gets_the_inputs_that_it_would_have_alone(batches):
    """Batches that stay for some steps, their sequences growing, and change in any way."""
    kept = SampleFeed(SOURCE, torch.device("cpu"))
    for batch, num_more in batches:
        for more in range(num_more + 1):
            rows = [
                line(seq_id, start + more, sampling, samples=samples, forced=forced, num_samples=num)
                for seq_id, start, sampling, samples, forced, num in batch
            ]
            assert flat(kept.inputs(rows)) == flat(sample_inputs(rows, SOURCE))


def test_while_a_batch_stays_only_its_keys_are_new(monkeypatch):
    made = []

    def counted(*args: Any) -> Any:
        made.append(args)
        return sample_inputs(*args)

    monkeypatch.setattr(feed, "sample_inputs", counted)
    kept = SampleFeed(SOURCE, torch.device("cpu"))
    steps = [[line(0, 5 + step, RANDOM), line(1, 9 + step, GREEDY)] for step in range(3)]
    inputs = [kept.inputs(rows) for rows in steps]
    assert len(made) == 1
    assert len({int(one.groups[0].keys[0]) for one in inputs}) == 3
    assert inputs[0].groups[0].temperatures is inputs[2].groups[0].temperatures
    kept.inputs(steps[2][:1])
    kept.inputs(steps[2])
    assert len(made) == 3


def test_a_step_that_raises_leaves_nothing_behind():
    kept = SampleFeed(SOURCE, torch.device("cpu"))
    good, bad = [line(0, 5, RANDOM)], [line(0, 5, SamplingParams(logit_bias={VOCAB_SIZE: 1.0}))]
    kept.inputs(good)
    with pytest.raises(AssertionError, match="biases are of tokens"):
        kept.inputs(bad)
    assert flat(kept.inputs(good)) == flat(sample_inputs(good, SOURCE))


def test_a_batch_that_returns_after_another_is_sent_again(gpu):
    """The other one has overwritten its inputs on the device, also if it is not kept itself."""
    kept = SampleFeed(SOURCE, torch.device("cuda", 0))
    random, penalised = [line(0, 5, RANDOM)], [line(1, 5, SamplingParams(temperature=1.5, presence_penalty=1.0))]
    for rows in (random, penalised, random):
        assert flat(kept.inputs(rows)) == flat(sample_inputs(rows, SOURCE))
