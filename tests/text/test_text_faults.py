"""Ctrl-C, iterators that are dropped, callbacks that raise, and every mistake a caller can make."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from experiments.cli import main
from experiments.configuration.config import GROUPS
from experiments.llm_settings import OF_RUNS, READ
from experiments.text import LLM
from real.config import RealConfig
from real.text.outputs import Piece
from real.text.sampling import SamplingParams
from testbed.errors import ConfigError, ModelError, RequestError, TestbedError
from tests.text.kit import (
    PROMPTS,
    ROOMY,
    SETTINGS,
    assert_idle,
    greedy,
    joined,
    make_folder,
    token_ids,
    tokenizer_with_chat,
    write,
)

# --- stopped early ---


@pytest.fixture
def own(folder: Path) -> LLM:
    """An LLM for a test that may break it; without a cache, so that free blocks are easy to count."""
    return LLM(folder, **ROOMY, prefix_caching=False)


def press_after(num: int) -> Any:
    seen: list[Piece] = []

    def on_piece(piece: Piece) -> None:
        seen.append(piece)
        if len(seen) == num:
            signal.raise_signal(signal.SIGINT)

    return on_piece


def test_ctrl_c_between_steps_frees_all_and_leaves_the_llm_as_good_as_before(own: LLM) -> None:
    wanted = token_ids(own.generate(PROMPTS, greedy()))
    with pytest.raises(KeyboardInterrupt):
        own.generate(PROMPTS, greedy(200, n=2, temperature=1.0), on_piece=press_after(20))
    assert_idle(own)
    assert token_ids(own.generate(PROMPTS, greedy())) == wanted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_within_a_step_waits_for_its_end(own: LLM) -> None:
    start, num = own._engine._backend.start, 0

    def pressed(plan: Any) -> Any:
        nonlocal num
        num += 1
        if num == 5:
            signal.raise_signal(signal.SIGINT)
        return start(plan)

    own._engine._backend.start = pressed
    with pytest.raises(KeyboardInterrupt):
        own.generate(PROMPTS, greedy(200))
    assert num == 5, "the step was finished, and none begun after it"
    assert own.scheduler.num_steps == 5
    assert_idle(own)
    assert len(token_ids(own.generate(PROMPTS, greedy()))) == 4


def test_an_impatient_ctrl_c_gets_out_of_a_step_and_the_llm_says_that_it_is_of_no_more_use(own: LLM) -> None:
    def pressed_twice(plan: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    own._engine._backend.start = pressed_twice
    with pytest.raises(KeyboardInterrupt):
        own.generate(PROMPTS, greedy())
    with pytest.raises(TestbedError, match="make a new LLM"):
        own.generate(PROMPTS, greedy())


@pytest.mark.parametrize("settings", ["roomy", "chunks"])  # with chunks, some have no token yet
def test_a_stream_that_is_closed_or_dropped_aborts_what_is_left(folder: Path, settings: str) -> None:
    own = LLM(folder, **SETTINGS[settings], prefix_caching=False)
    stream = own.stream(PROMPTS, greedy(100, stop="never in it"))
    assert next(stream).token_ids
    with pytest.raises(TestbedError, match="still open"):
        own.generate(PROMPTS[0], greedy())
    assert own.scheduler.has_work
    stream.close()
    assert_idle(own)
    for number, _ in enumerate(own.stream(PROMPTS, greedy(100))):
        if number == 10:
            break
    assert_idle(own)


def test_a_callback_that_raises_ends_the_call_and_nothing_else(own: LLM) -> None:
    def fail(piece: Piece) -> None:
        raise ValueError("of the caller's own")

    with pytest.raises(ValueError, match="of the caller's own"):
        own.generate(PROMPTS, greedy(100), on_piece=fail)
    assert_idle(own)


def test_closing_twice_is_fine_and_a_closed_llm_says_so(own: LLM) -> None:
    with own:
        pass
    own.close()
    with pytest.raises(RequestError, match="closed"):
        own.generate(PROMPTS, greedy())


# --- mistakes ---


@pytest.mark.parametrize(
    ("prompts", "sampling", "says"),
    [
        ("", None, "prompt 0 is empty"),
        ([[]], None, "prompt 0 is empty"),
        (["a", ""], None, "prompt 1 is empty"),
        ([[1], [2, 512]], None, "prompt 1 has token id 512; the model's vocabulary has ids 0 to 511"),
        ([[1, -1]], None, "prompt 0 has token id -1"),
        ([[1] * 257], None, r"prompt 0 has 257 tokens, more than max_model_len \(256\)"),
        ([3.5], None, "prompt 0 is 3.5; it must be a string, token ids, or a dict"),
        ([{"prompt": 10**5000}], None, "prompt 0 is a whole number of about 5,001 digits; it must be a string"),
        ([[10**5000]], None, "prompt 0 has token id a whole number of about 5,001 digits"),
        (7, None, "prompts is a int"),
        ([[1, "a"]], None, "prompt 0 is"),
        ({"promt": "a"}, None, "prompt 0 has the key 'promt'; valid: prompt,"),
        ({"prompt": "a", "priority": 1.5}, None, "prompt 0 has priority 1.5; it must be a whole number"),
        ({"prompt": "a", "cache_salt": 5}, None, "prompt 0 has cache_salt 5; it must be a string"),
        ({"prompt": "a", "prompt_token_ids": [1]}, None, "either prompt or prompt_token_ids"),
        ({"cache_salt": "a"}, None, "either prompt or prompt_token_ids"),
        ("a", {"temperature": 1}, "sampling_params is a dict; give SamplingParams"),
        ("a", [3], "sampling_params has a int; give SamplingParams"),
        (["a", "b"], [greedy()], "2 prompts and 1 sampling parameters"),
        ("a", greedy(n=500, temperature=1.0), "prompt 0 asks for 500 sequences"),
        ("a", greedy(min_tokens=2, stop_token_ids=range(600)), "prompt 0: min_tokens is 2, and every token"),
        ("a", greedy(logit_bias={512: 1.0}), "logit_bias names token 512; the model's vocabulary has ids 0 to 511"),
        ("a", greedy(beam_width=2, stop="x"), "beam search does not look for stop strings"),
    ],
)
def test_what_can_never_be_served_is_refused_before_anything_runs(
    llm: LLM, prompts: Any, sampling: Any, says: str
) -> None:
    before = llm.scheduler.num_steps
    for call in (llm.generate, llm.stream):
        with pytest.raises(RequestError, match=says) as caught:
            call(prompts, sampling)
        assert "\n" not in str(caught.value)
    assert llm.scheduler.num_steps == before
    assert_idle(llm)


def test_more_samples_than_a_step_has_tokens_are_refused(folder: Path) -> None:
    narrow = LLM(folder, **(ROOMY | {"max_num_batched_tokens": 4, "max_num_seqs": 8}))
    with pytest.raises(RequestError, match=r"asks for 5 sequences, .* max_num_batched_tokens 4; lower n"):
        narrow.generate("a", greedy(n=5, temperature=1.0))


def test_a_prompt_that_no_pool_could_hold_is_refused(folder: Path) -> None:
    small = LLM(folder, **(ROOMY | {"num_gpu_blocks": 8}))
    with pytest.raises(RequestError, match=r"prompt 1 can never fit: .* raise num_gpu_blocks"):
        small.generate([[1, 2], [1] * 100], greedy())
    (output,) = small.generate([[1] * 20], greedy(100))  # fits, and grows out of the pool
    (one,) = output.outputs
    assert (one.finish_reason, len(one.token_ids)) == ("ignored", 13)
    assert output.message
    text, tokens, ends = joined(list(small.stream([[1] * 20], greedy(100))))[0, 0]
    assert (text, tokens, ends) == (one.text, one.token_ids, [None] * 13 + ["ignored"])
    assert_idle(small)


def test_a_bad_config_is_not_blamed_on_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    (bad / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"bad/config\.json is not JSON"):
        LLM(bad, **ROOMY)
    config = json.loads((folder / "config.json").read_text())
    write(bad, "config.json", **(config | {"head_dim": 7}))  # of which only transformers complains
    with pytest.raises(ModelError, match=r"bad/config\.json is refused by transformers: .*`head_dim`=7") as caught:
        LLM(bad, **ROOMY)
    assert "\n" not in str(caught.value)


def test_a_closed_stdout_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    output = tmp_path / "out.jsonl"
    assert main(["generate", "--model", "tiny", "a", "--max-tokens", "2", "--output", str(output)]) == 0
    assert len(output.read_text().splitlines()) == 1


def test_texts_without_a_tokenizer_are_refused_with_the_way_out(tmp_path: Path) -> None:
    bare = LLM(make_folder(tmp_path / "model", tokenizer=None), **ROOMY)
    with pytest.raises(RequestError, match="prompt 0 is a string, and the model's folder has no tokenizer; pass token"):
        bare.generate("a", greedy())
    with pytest.raises(RequestError, match="stop strings, and there is no tokenizer"):
        bare.generate([1, 2], greedy(stop="a"))
    with pytest.raises(RequestError, match="no chat template; pass tokenizer="):
        bare.chat([{"role": "user", "content": "a"}])


def test_a_conversation_without_a_template_or_that_it_refuses(llm: LLM) -> None:
    for template in ("{{ raise_exception('roles must alternate') }}", "{{ 1 // 0 }}", "{% for"):
        with pytest.raises(RequestError, match="refuses the messages"):
            llm.chat([{"role": "user", "content": "a"}], chat_template=template)
    with pytest.raises(
        RequestError, match="refuses the messages: continue_final_message and add_generation_prompt are"
    ):
        llm.chat([{"role": "user", "content": "a"}], continue_final_message=True)
    with pytest.raises(RequestError, match="conversation 1 is empty; give it at least one message"):
        llm.chat([[{"role": "user", "content": "a"}], []])
    for wrong, told in (
        (5, "messages is 5; give"),
        ("hi", "messages is 'hi'; give"),
        ([5], "conversation 0 is 5; give"),
    ):
        with pytest.raises(RequestError, match=told):
            llm.chat(wrong)
    template, llm.tokenizer.inner.chat_template = llm.tokenizer.inner.chat_template, None
    try:
        with pytest.raises(RequestError, match="no chat template"):
            llm.chat([{"role": "user", "content": "a"}])
        llm.tokenizer.inner.chat_template = {"long": template, "short": template}  # of which none is the default
        with pytest.raises(RequestError, match="refuses the messages: This model has multiple chat templates"):
            llm.chat([{"role": "user", "content": "a"}])
    finally:
        llm.tokenizer.inner.chat_template = template


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"blok_size": 4}, "LLM has no argument 'blok_size'; did you mean 'block_size'"),
        ({"what": 4}, "tensor_parallel_size, seed, enforce_eager, backend, cache, cost"),  # no group that is refused
        ({"block_size": 0}, "block_size"),
        ({"status_s": float("nan")}, "status_s is nan; it must be above 0"),
        ({"scheduler": "vlm_v1"}, "did you mean 'vllm_v1'"),
        ({"dtype": "float64"}, "float64"),
        ({"max_model_len": 100_000}, "max_model_len is 100000, but the model has 256"),
        ({"cache.blok": 4}, "cache.blok"),
        ({"tokenizer": "nowhere"}, "no tokenizer at nowhere"),
        ({"tokenizer": 7}, "tokenizer is a int"),
        ({"backend": "sim"}, "backend=sim: text comes from the real engine only"),
        ({"backend": {"name": "vllm"}}, "backend=vllm: text comes from the real engine only"),
        (
            {"backend.num_replicas": 2},
            "backend.num_replicas is of runs of traces, and text does not read it; leave it out",
        ),
        ({"backend": {"router": {"_target_": "a.B"}}}, "backend.router._target_ is of runs of traces"),
        ({"backend.speed": 2}, "backend.speed is of runs of traces"),
        ({"record": {"profile": "0:3"}}, "record.profile is of runs of traces"),
        ({"trace": "azure"}, "trace is of runs of traces"),
        ({"slo.ttft_ms": 5}, "slo.ttft_ms is of runs of traces"),
        ({"report.confidence": 0.9}, "report.confidence is of runs of traces"),
        ({"sampling": {"temperature": 0.0}}, "text takes SamplingParams(temperature=…) with the prompts"),
        ({"sampling": "recommended"}, "sampling is of runs of traces; text takes SamplingParams(…) with the prompts"),
    ],
)
def test_settings_that_cannot_be_are_one_line(folder: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(folder, **(ROOMY | settings))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_key_of_an_engine_is_read_or_refused() -> None:
    """A new key of `backend` is in one of these lists, so that none is ignored without a word."""
    read = {
        "device", "dtype", "attention", "load_format", "cpu_kv_bytes", "num_threads", "cuda_graphs",
        "max_captured_size", "max_captured_tokens", "k_scale", "v_scale", "rank_timeout_s",
    }  # fmt: skip
    assert {f"backend.{item.name}" for item in fields(RealConfig)} == {f"backend.{name}" for name in read} | {*OF_RUNS}
    assert set(READ) - {"seed"} < set(GROUPS)


def test_no_model_at_the_path_says_what_is_wanted(tmp_path: Path) -> None:
    for path in ("nowhere/at/all", "qwen3_0.6b"):
        with pytest.raises(ModelError, match=rf"no model at {path}: expected a local folder with config.json"):
            LLM(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"expected a folder with config\.json"):
        LLM(tmp_path / "empty")


def test_a_damaged_checkpoint_names_the_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", tokenizer=tokenizer_with_chat())
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is not JSON"):
        LLM(folder, **ROOMY)
    for values, told in (({"temperature": -1}, "temperature is -1"), ({"max_new_tokens": 0}, "max_new_tokens is 0")):
        write(folder, "generation_config.json", **values)
        with pytest.raises(RequestError, match=rf"model/generation_config\.json: {told}; it must be"):
            LLM(folder, **ROOMY).generate("a")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"the tokenizer at .* cannot be read"):
        LLM(folder, **ROOMY)


def test_a_name_of_a_model_goes_with_random_weights() -> None:
    with LLM("tiny", load_format="dummy", tokenizer=tokenizer_with_chat(), device="cpu", num_gpu_blocks=32) as llm:
        assert llm.config.model.vocab_size == 512
    settings: dict[str, Any] = {"model.num_hidden_layers": 1, "model.vocab_size": 600}
    with LLM("qwen3_0.6b", load_format="dummy", device="cpu", num_gpu_blocks=8, **settings) as llm:
        (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
