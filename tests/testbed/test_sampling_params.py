"""Sampling parameters: what is accepted, what is refused and how, and that the core's decisions do not hang on them."""

from __future__ import annotations

from ast import Attribute, walk

import numpy as np
import pytest

from experiments.configuration.compose import compose_config
from testbed.core.request import GREEDY, SamplingParams
from testbed.errors import RequestError
from tests.source_tree import ROOT, tree_of

OWN = ROOT / "testbed" / "core" / "sampling.py"
BAD = [
    ({"temperature": -0.5}, r"sampling.temperature is -0.5; it must be 0 \(greedy\) or above"),
    ({"temperature": float("nan")}, "sampling.temperature is nan"),
    ({"temperature": float("inf")}, "sampling.temperature is inf"),
    ({"temperature": "hot"}, "sampling.temperature is 'hot'"),
    ({"temperature": 10**400}, "sampling.temperature is a whole number of about 401 digits"),
    ({"repetition_penalty": -(10**400)}, "sampling.repetition_penalty is"),
    ({"logit_bias": {10**400: 1.0}}, "sampling.logit_bias has the token 100000000"),
    ({"top_p": 0.0}, "sampling.top_p is 0.0; it must be above 0 and at most 1"),
    ({"top_p": 1.5}, "sampling.top_p is 1.5"),
    ({"top_k": -2}, "sampling.top_k is -2; it must be at least 1, or 0 or -1 for no limit"),
    ({"top_k": 2.5}, "sampling.top_k is 2.5"),
    ({"min_p": 1.01}, "sampling.min_p is 1.01; it must be from 0 to 1"),
    ({"presence_penalty": 2.5}, "sampling.presence_penalty is 2.5; it must be from -2 to 2"),
    ({"frequency_penalty": -3}, "sampling.frequency_penalty is -3; it must be from -2 to 2"),
    ({"repetition_penalty": 0}, "sampling.repetition_penalty is 0; it must be above 0"),
    ({"logprobs": -1}, "sampling.logprobs is -1; it must be 0 or above, or null"),
    ({"logprobs": True}, "sampling.logprobs is true"),
    ({"prompt_logprobs": -1}, "sampling.prompt_logprobs is -1"),
    ({"max_tokens": 0}, "sampling.max_tokens is 0; it must be at least 1"),
    ({"min_tokens": -1}, "sampling.min_tokens is -1; it must be 0 or above"),
    ({"min_tokens": 5, "max_tokens": 4}, r"sampling.min_tokens is 5; it must be at most max_tokens \(4\)"),
    ({"ignore_eos": "yes"}, "sampling.ignore_eos is 'yes'; it must be true or false"),
    ({"include_stop_str_in_output": "no"}, "sampling.include_stop_str_in_output is 'no'; it must be true or false"),
    ({"skip_special_tokens": None}, "sampling.skip_special_tokens is null; it must be true or false"),
    ({"skip_special_tokens": 1}, "sampling.skip_special_tokens is 1; it must be true or false"),
    ({"seed": 1.5}, "sampling.seed is 1.5; it must be a whole number, or null"),
    ({"stop": ["a", ""]}, "sampling.stop has an empty string"),
    ({"stop": 7}, "sampling.stop is 7; it must be a string or strings"),
    ({"stop": ["a", 7]}, r"sampling.stop is \('a', 7\); it must be a string or strings"),
    ({"stop_token_ids": [-1]}, "sampling.stop_token_ids has the token -1; token ids are whole, from 0 to 2147483647"),
    (
        {"stop_token_ids": [10**60]},
        "sampling.stop_token_ids has the token 100000000000000000...0000000000000000000; token ids ",
    ),
    ({"stop_token_ids": 4}, "sampling.stop_token_ids is 4; it must be a list of token ids"),
    ({"logit_bias": {3: 101}}, "sampling.logit_bias of token 3 is 101; it must be a number from -100 to 100"),
    ({"logit_bias": {3: True}}, "sampling.logit_bias of token 3 is true; it must be a number from -100 to 100"),
    ({"logit_bias": 3}, "sampling.logit_bias is 3; it must be token ids, each with a number"),
    ({"logit_bias": {"a": 1}}, "sampling.logit_bias has the token 'a'"),
    ({"logit_bias": [3]}, r"sampling.logit_bias is \(3,\); it must be token ids, each with a number"),
    ({"logit_bias": [(3, 1.0), (3, 2.0)]}, "sampling.logit_bias names a token twice"),
    ({"n": 0}, "sampling.n is 0; it must be at least 1"),
    ({"n": 3, "best_of": 2}, r"sampling.best_of is 2; it must be at least n \(3\)"),
    ({"n": 3, "beam_width": 2}, r"sampling.beam_width is 2; it must be 0 \(no beam search\) or at least n \(3\)"),
    ({"best_of": 2, "beam_width": 2}, "exclude each other"),
    ({"beam_width": 2, "presence_penalty": 1.0}, "sampling.beam_width excludes penalties and logit_bias"),
    ({"length_penalty": float("inf")}, "sampling.length_penalty is inf"),
    ({"length_penalty": 1000}, "sampling.length_penalty is 1000; it must be from -10 to 10"),
    ({"length_penalty": -400}, "sampling.length_penalty is -400; it must be from -10 to 10"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=[str(values) for values, _ in BAD])
def test_what_is_out_of_range_is_refused_in_one_line(values, message):
    with pytest.raises(RequestError, match=message) as error:
        SamplingParams(**values)
    assert "\n" not in str(error.value)


def test_lists_become_tuples_so_that_equal_parameters_are_one():
    written = SamplingParams(stop="end", stop_token_ids=[3, 4], logit_bias={7: 1.0, 8: -2})
    read = SamplingParams(stop=["end"], stop_token_ids=(3, 4), logit_bias=[[7, 1.0], [8, -2]])
    assert written == read
    assert hash(written) == hash(read)
    assert (written.stop, written.stop_token_ids, written.logit_bias) == (("end",), (3, 4), ((7, 1.0), (8, -2)))


def test_none_where_there_may_be_several_is_nothing():
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


def test_numbers_and_flags_of_numpy_are_as_python_s():
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int32(4), ignore_eos=np.True_)
    assert params.is_filtered


@pytest.mark.parametrize(
    ("values", "filtered", "penalised", "history", "logprobs"),
    [
        ({}, False, False, False, False),
        ({"top_k": -1, "stop": "x", "min_tokens": 3, "logit_bias": {1: 1}}, False, False, False, False),
        ({"top_p": 0.9}, True, False, False, False),
        ({"presence_penalty": -1}, False, True, True, False),
        ({"prompt_logprobs": 0}, False, False, True, False),
        ({"logprobs": 0}, False, False, False, True),
        ({"n": 2}, False, False, False, False),
        ({"n": 2, "best_of": 3}, False, False, False, True),  # to rank them
        ({"beam_width": 2}, False, False, False, True),
    ],
)
def test_a_backend_is_told_what_is_needed_and_no_more(values, filtered, penalised, history, logprobs):
    params = SamplingParams(**values)
    found = params.is_filtered, params.is_penalised, params.needs_history, params.needs_logprobs
    assert found == (filtered, penalised, history, logprobs)


def test_the_sampling_group_of_a_run_has_the_same_keys_and_defaults():
    of_texts = {"stop", "include_stop_str_in_output", "skip_special_tokens", "length_penalty"}
    config = compose_config([])
    assert set(config.raw["sampling"]) - {"name"} == set(SamplingParams.__slots__) - of_texts
    assert config.sampling == GREEDY


def test_every_parameter_is_read_where_sequences_grow():
    """Not only checked and recorded: a run would take it without effect."""
    files = [file for room in ("testbed/core", "real/sampling", "real/text") for file in (ROOT / room).glob("*.py")]
    nodes = [node for file in files if file != OWN for node in walk(tree_of(file))]
    read = {node.attr for node in nodes if isinstance(node, Attribute)}
    assert set(SamplingParams.__slots__) - read == {"best_of"}, "which they know by num_seqs"
