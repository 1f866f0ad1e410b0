"""LLM through the engine, on a tiny checkpoint: tokens, texts, samples, streams, prompts in every form."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.llm_settings import find_model
from experiments.text import LLM
from real.text.collector import Collector
from real.text.outputs import CompletionOutput, Piece
from real.text.sampling import SamplingParams
from testbed.core.commands import Recorder, StepView
from testbed.core.outcome import Outcome
from testbed.errors import ConfigError, ModelError
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

MARGIN = 1e-4  # where the reference's two best tokens are closer, either is right


def agrees(model: Any, prompt: list[int], output: list[int]) -> bool:
    """Whether each token is the reference's best, given those before it; False at the first that is too close."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    for token, row in zip(output, logits, strict=True):
        best = row.topk(2)
        if best.values[0] - best.values[1] < MARGIN:
            return False
        assert token == best.indices[0]
    return True


def test_greedy_tokens_are_those_of_transformers_and_texts_what_it_decodes(llm: LLM, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    outputs = llm.generate(PROMPTS, greedy(16))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    clear = 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (one,) = output.outputs
        assert (output.prompt, output.prompt_token_ids) == (prompt, tokenizer(prompt).input_ids)
        assert one.text == tokenizer.decode(one.token_ids, skip_special_tokens=True)
        assert (one.finish_reason, len(one.token_ids), output.finished) == ("length", 16, True)
        if agrees(model, output.prompt_token_ids, one.token_ids):
            ids = torch.tensor([output.prompt_token_ids])
            whole = model.generate(ids, do_sample=False, max_new_tokens=16, min_new_tokens=16)
            if 0 not in one.token_ids:
                assert whole[0, ids.shape[1] :].tolist() == one.token_ids
                clear += 1
    assert clear >= 2, "nothing was compared"
    assert_idle(llm)


@pytest.mark.parametrize("settings", ["chunks", "tight", "two phases"])
def test_texts_do_not_depend_on_how_they_were_scheduled(llm: LLM, folder: Path, settings: str) -> None:
    sampling = [greedy(24), greedy(24, n=2, temperature=1.0, seed=5), greedy(24, stop=["e", "の"]), greedy(24)]
    wanted = llm.generate(PROMPTS, sampling)
    with LLM(folder, **SETTINGS[settings]) as other:
        num_preempted = count_preemptions(other)
        found = other.generate(PROMPTS, sampling)
        assert [output.metrics.num_cached_tokens for output in found] == [0] * 4, "of the first admission"
        streamed = joined(list(other.stream(PROMPTS, sampling)))
        assert_idle(other)
        assert bool(num_preempted) == (settings != "chunks")
    for before, after in zip(wanted, found, strict=True):
        assert before.outputs == after.outputs
    for output, index in zip(found, range(len(PROMPTS)), strict=True):
        for one in output.outputs:
            text, tokens, ends = streamed[index, one.index]
            assert (text, tokens, ends[-1]) == (one.text, one.token_ids, one.finish_reason)


STOPPED = {"stop": ["never"], "stop_token_ids": list(range(0, 512, 6)), "temperature": 1.5}


@pytest.mark.parametrize("changes", [{}, {"num_gpu_blocks": 8, "prefix_caching": False}], ids=["roomy", "tight"])
def test_texts_of_samples_with_stops_do_not_depend_on_what_is_in_flight(
    llm: LLM, folder: Path, changes: dict[str, Any]
) -> None:
    """Samples end while their next row is in flight; when memory is tight they are preempted before they fork."""
    sampling = [greedy(6, temperature=1.0, seed=1), *(greedy(6, n=2, seed=seed, **STOPPED) for seed in range(5))]
    prompts = [PROMPTS[0], *[PROMPTS[1]] * 5]
    wanted = llm.generate(prompts, sampling)
    with LLM(folder, **ROOMY | changes, scheduler="vllm_v1_async") as other:
        num_preempted = count_preemptions(other)
        found = other.generate(prompts, sampling)
        assert_idle(other)
    assert bool(num_preempted) == bool(changes)
    assert [output.outputs for output in found] == [output.outputs for output in wanted]
    assert {one.finish_reason for output in found for one in output.outputs} == {"stop", "length"}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_text_begins_anew_where_the_first_token_is_sampled_again(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A prompt of several samples is preempted while its first tokens are in flight."""
    num_first: Counter[int] = Counter()
    marked = Collector.marked

    def counted(self: Collector, outcome: Outcome) -> Outcome:
        num_first[outcome.seq_id] += bool(outcome.forks)
        return marked(self, outcome)

    prompts = [[1 + number] * 5 for number in range(5)]
    sampling = [greedy(8, n=2, temperature=1.5, seed=seed, stop="never in it") for seed in range(5)]
    wanted = llm.generate(prompts, sampling)
    monkeypatch.setattr(Collector, "marked", counted)
    tight = ROOMY | {"num_gpu_blocks": 8, "num_cpu_blocks": 64, "prefix_caching": False, "max_num_batched_tokens": 18}
    with LLM(folder, **tight, scheduler={"name": "vllm_v1_async", "preemption": mode}) as other:
        found = other.generate(prompts, sampling)
    assert max(num_first.values()) == 2
    assert [output.outputs for output in found] == [output.outputs for output in wanted]


class Preempted(Recorder):
    """A recorder of who was preempted."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def committed(self, step: StepView) -> None:
        self.names += [item.request_id for item in step.plan.preempted]


def count_preemptions(llm: LLM) -> list[str]:
    """A list that will name whoever is preempted."""
    watch, inner = Preempted(), llm._engine.serve
    llm._engine.serve = lambda *args, watchers, **more: inner(*args, watchers=[*watchers, watch], **more)
    return watch.names


# --- stop strings ---

SEEDED = SamplingParams(seed=5, max_tokens=40, ignore_eos=True)  # more various than greedy texts of random weights


def stop_across_a_border(llm: LLM) -> tuple[str, str, list[int], int]:
    """(stop string, whole text, tokens, how many of them complete it): its characters come from two tokens."""
    (output,) = llm.generate(PROMPTS[0], SEEDED)
    whole, ids = output.outputs[0].text, output.outputs[0].token_ids
    decode = llm.tokenizer.decode
    for number in range(4, len(ids)):
        before, after = decode(ids[:number]), decode(ids[: number + 1])
        stop = after[len(before) - 1 : len(before) + 1]
        if after.startswith(before) and len(stop) == 2 and "\ufffd" not in stop and stop not in before:
            return stop, whole, ids, number + 1
    raise AssertionError("no such stop string; choose another seed")


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_across_tokens_ends_the_text_and_no_token_more_is_computed(llm: LLM, included: bool) -> None:
    stop, whole, ids, num_tokens = stop_across_a_border(llm)
    sampling = replace(SEEDED, stop=("never in it", stop), include_stop_str_in_output=included)
    before = llm.scheduler.num_steps
    (output,) = llm.generate(PROMPTS[0], sampling)
    (one,) = output.outputs
    assert (one.finish_reason, one.stop_reason) == ("stop", stop)
    assert one.token_ids == ids[:num_tokens]
    assert one.text == whole[: whole.index(stop) + (len(stop) if included else 0)]
    assert llm.scheduler.num_steps - before == num_tokens
    pieces = list(llm.stream(PROMPTS[0], sampling))
    assert joined(pieces)[0, 0][:2] == (one.text, one.token_ids)
    assert_idle(llm)


def test_a_sample_may_stop_with_its_first_token(llm: LLM) -> None:
    sampling = SamplingParams(n=4, seed=7, max_tokens=6, ignore_eos=True)
    (free,) = llm.generate(PROMPTS[0], sampling)
    firsts = [llm.tokenizer.decode(one.token_ids[:1]) for one in free.outputs]
    stop = next(text for text in firsts[1:] if text != firsts[0] and text.strip() and "\ufffd" not in text)
    (output,) = llm.generate(PROMPTS[0], SamplingParams(n=4, seed=7, max_tokens=6, ignore_eos=True, stop=stop))
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    for before, after in zip(free.outputs, output.outputs, strict=True):
        num = next((k for k in range(1, 7) if stop in llm.tokenizer.decode(before.token_ids[:k])), None)
        assert after.token_ids == before.token_ids[:num]
        assert after.stop_reason == (None if num is None else stop)
        assert after.text == before.text.partition(stop)[0]
    assert 1 in [len(one.token_ids) for one in output.outputs[1:]]
    assert_idle(llm)


def test_min_tokens_come_before_any_stop(llm: LLM) -> None:
    (free,) = llm.generate(PROMPTS[0], greedy(12))
    stop = llm.tokenizer.decode(free.outputs[0].token_ids[:1])
    (output,) = llm.generate(PROMPTS[0], greedy(12, stop=stop, min_tokens=3))
    assert len(output.outputs[0].token_ids) > 3


def test_a_stop_token_ends_the_text_before_it(llm: LLM) -> None:
    (free,) = llm.generate(PROMPTS[0], greedy(12))
    ids = free.outputs[0].token_ids
    stop = next(token for number, token in enumerate(ids) if number > 2 and token not in ids[:number])
    for included, more in ((False, {}), (True, {}), (False, {"stop": "never in it"})):
        sampling = greedy(12, stop_token_ids=[stop], include_stop_str_in_output=included, **more)
        (one,) = llm.generate(PROMPTS[0], sampling)[0].outputs
        end = ids.index(stop) + 1
        assert (one.finish_reason, one.stop_reason, one.token_ids) == ("stop", stop, ids[:end])
        assert one.text == llm.tokenizer.decode(ids[: end if included else end - 1])
        assert joined(list(llm.stream(PROMPTS[0], sampling)))[0, 0][0] == one.text


# --- samples ---


def test_samples_of_a_seed_are_the_same_again_and_differ_from_each_other(llm: LLM) -> None:
    sampling = SamplingParams(n=3, seed=11, max_tokens=8, ignore_eos=True)
    once = llm.generate([PROMPTS[1], PROMPTS[0]], sampling)
    again = llm.generate([PROMPTS[0]], sampling)
    assert token_ids(once[1:]) == token_ids(again)
    assert len({tuple(ids) for ids in token_ids(again)}) == 3
    other = llm.generate(PROMPTS[0], SamplingParams(n=3, seed=12, max_tokens=8, ignore_eos=True))
    assert token_ids(other) != token_ids(again)
    unseeded = SamplingParams(max_tokens=8, ignore_eos=True)
    assert token_ids(llm.generate(PROMPTS[0], unseeded)) != token_ids(llm.generate(PROMPTS[0], unseeded))


def score(one: CompletionOutput) -> float:
    return sum(each[token].logprob for each, token in zip(one.logprobs, one.token_ids, strict=True))


def test_the_best_of_several_are_returned_best_first(llm: LLM) -> None:
    more = {"seed": 4, "max_tokens": 6, "ignore_eos": True, "logprobs": 2}
    (whole,) = llm.generate(PROMPTS[0], SamplingParams(n=5, **more))
    (best,) = llm.generate(PROMPTS[0], SamplingParams(n=2, best_of=5, **more))
    ranked = sorted(whole.outputs, key=lambda one: -score(one))
    assert [one.token_ids for one in best.outputs] == [one.token_ids for one in ranked[:2]]
    assert [one.index for one in best.outputs] == [0, 1]
    for one in best.outputs:
        assert one.cumulative_logprob == pytest.approx(score(one))
        assert all(len(each) in (2, 3) for each in one.logprobs)
    assert whole.outputs[0].cumulative_logprob is not None


@pytest.mark.parametrize("num", [2, 3])
def test_beams_come_best_first(llm: LLM, num: int) -> None:
    (output,) = llm.generate(PROMPTS[0], greedy(5, beam_width=3, n=num))
    scores = [one.cumulative_logprob / len(one.token_ids) for one in output.outputs]
    assert len(scores) == num
    assert scores == sorted(scores, reverse=True)
    (found,) = llm.generate(PROMPTS[0], greedy(5, logprobs=0))
    assert output.outputs[0].cumulative_logprob >= found.outputs[0].cumulative_logprob - 1e-4
    streamed = joined(list(llm.stream(PROMPTS[0], greedy(5, beam_width=3, n=num))))
    assert [streamed[0, one.index][0] for one in output.outputs] == [one.text for one in output.outputs]


def test_beams_are_the_same_where_the_preset_recomputes_everything_else(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", tokenizer=tokenizer_with_chat())
    tight = ROOMY | {"num_gpu_blocks": 44, "num_cpu_blocks": 200, "prefix_caching": False}
    recomputing = LLM(folder, **tight, **{"scheduler.preemption": "recompute"})
    with_room = LLM(folder, **(ROOMY | {"prefix_caching": False}))
    cache, swapped = recomputing._backend.cache, list[int]()
    moved = cache.execute
    cache.execute = lambda plan: swapped.append(len(plan.swap_out)) or moved(plan)
    found, wanted = (one.generate(PROMPTS, greedy(40, beam_width=3)) for one in (recomputing, with_room))
    assert sum(swapped) > 0
    assert token_ids(found) == token_ids(wanted)


def test_logprobs_of_a_prompt_have_one_for_each_token_but_the_first(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[0], greedy(2, prompt_logprobs=1))
    first, *rest = output.prompt_logprobs
    assert first is None
    assert all(token in each for token, each in zip(output.prompt_token_ids[1:], rest, strict=True))
    assert llm.generate(PROMPTS[0], greedy(2))[0].prompt_logprobs is None


# --- prompts and calls ---


def test_prompts_come_in_every_form_and_outputs_in_their_order(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPTS[0])
    (wanted,) = token_ids(llm.generate(PROMPTS[0], greedy()))
    for prompts in (ids, [ids], {"prompt_token_ids": ids}, [{"prompt": PROMPTS[0]}], torch.tensor(ids)):
        (output,) = llm.generate(prompts, greedy())
        assert output.outputs[0].token_ids == wanted
    each = [greedy(9 - index) for index in range(4)]
    mixed = llm.generate([PROMPTS[1], ids, {"prompt": PROMPTS[2]}, PROMPTS[3]], each)
    assert [len(output.outputs[0].token_ids) for output in mixed] == [9, 8, 7, 6]
    assert [output.prompt for output in mixed] == [PROMPTS[1], None, PROMPTS[2], PROMPTS[3]]
    assert llm.generate([], greedy()) == []
    assert list(llm.stream([], greedy())) == []


def test_the_prefix_cache_and_the_counters_stay_from_call_to_call(folder: Path) -> None:
    prompt = "What you simulate is what runs. " * 3
    with LLM(folder, **ROOMY) as llm:
        (first,) = llm.generate(prompt, greedy())
        steps = llm.scheduler.num_steps
        (second,) = llm.generate(prompt, greedy())
        assert llm.scheduler.num_steps == 2 * steps
        llm.reset_prefix_cache()
        (third,) = llm.generate(prompt, greedy())
        assert_idle(llm)
    num = len(first.prompt_token_ids)
    assert first.metrics.num_cached_tokens == 0
    assert num - 5 < second.metrics.num_cached_tokens < num
    assert third.metrics.num_cached_tokens == 0
    assert third.outputs == second.outputs == first.outputs
    assert second.metrics.arrival_ns >= first.metrics.finished_ns > first.metrics.first_token_ns
    assert second.request_id != first.request_id


def test_pieces_and_outputs_are_told_as_they_come(llm: LLM) -> None:
    pieces: list[Piece] = []
    told: list[int] = []
    outputs = llm.generate(
        PROMPTS, [greedy(3 + 2 * index) for index in range(4)], on_piece=pieces.append,
        on_output=lambda index, output: told.append(index),
    )  # fmt: skip
    assert told == [0, 1, 2, 3]
    found = joined(pieces)
    for index, output in enumerate(outputs):
        text, tokens, ends = found[index, 0]
        assert (text, tokens) == (output.outputs[0].text, output.outputs[0].token_ids)
        assert ends == [None] * (len(tokens) - 1) + ["length"]
    assert pieces[0].finished is False


def test_a_conversation_is_put_into_the_model_s_template(llm: LLM) -> None:
    turns = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(turns, greedy())
    assert output.prompt == "<user>hi<assistant>"
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt)
    both = llm.chat([turns, [*turns, {"role": "assistant", "content": "yes"}]], greedy())
    assert both[0].outputs == output.outputs
    assert both[1].prompt == "<user>hi<assistant>yes<assistant>"


# --- what a checkpoint brings ---


def test_a_checkpoint_says_how_to_sample_and_where_texts_end(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", tokenizer=tokenizer_with_chat(), eos_token_id=1)
    (free,) = LLM(folder, **ROOMY).generate(PROMPTS[0], greedy(12))
    ids = free.outputs[0].token_ids
    end = next(token for number, token in enumerate(ids) if number > 2 and token not in ids[:number])
    write(folder, "generation_config.json", temperature=0.5, top_k=7, max_new_tokens=3, eos_token_id=[5, end])
    llm = LLM(folder, **ROOMY)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7, max_tokens=3)
    (one,) = llm.generate(PROMPTS[0])[0].outputs
    assert len(one.token_ids) <= 3
    (one,) = llm.generate(PROMPTS[0], greedy(12, ignore_eos=False))[0].outputs
    assert (one.finish_reason, one.stop_reason) == ("stop", None)
    assert one.token_ids == ids[: ids.index(end) + 1]
    assert one.text == llm.tokenizer.decode(ids[: ids.index(end)])


def test_vllm_s_defaults_hold_where_nothing_is_said(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=1.0, max_tokens=16)
    assert SamplingParams(stop="x").stop == SamplingParams(stop=["x"]).stop == ("x",)


def test_without_a_tokenizer_token_ids_work_and_texts_are_empty(tmp_path: Path, llm: LLM) -> None:
    folder = make_folder(tmp_path / "model", tokenizer=None)
    ids = llm.tokenizer.encode(PROMPTS[0])
    (wanted,) = llm.generate(ids, greedy())
    bare = LLM(folder, **ROOMY)
    (found,) = bare.generate(ids, greedy())
    assert (found.outputs[0].token_ids, found.outputs[0].text) == (wanted.outputs[0].token_ids, "")
    assert [piece.text for piece in bare.stream(ids, greedy(2))] == ["", ""]
    given = LLM(folder, tokenizer=llm.tokenizer.inner, **ROOMY)
    assert given.generate(PROMPTS[0], greedy())[0].outputs == wanted.outputs
    assert LLM(folder, tokenizer=llm.tokenizer.inner.backend_tokenizer, **ROOMY).tokenizer is not None


@pytest.mark.parametrize(("model", "load_format"), [("tiny", None), ("qwen3_0.6b", "dummy")])
def test_a_folder_that_is_no_checkpoint_hides_no_model_that_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, load_format: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(model).mkdir()  # say, of `testbed calibrate --out tiny`
    assert find_model(model, None, load_format).folder is None
    Path(model, "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"config\.json"):
        find_model(model, None, load_format)


def test_a_newcomer_needs_nothing() -> None:
    with LLM("tiny", device="cpu", num_gpu_blocks=64) as llm:
        (output,) = llm.generate("Hello", SamplingParams(max_tokens=4))
        assert output.outputs[0].text
    with LLM("tiny", device="cpu", num_gpu_blocks=64) as llm:
        assert llm.generate("Hello", SamplingParams(max_tokens=4))[0].outputs == output.outputs


def test_ranks_give_the_same_texts(llm: LLM, folder: Path) -> None:
    sampling = greedy(8, n=2, temperature=1.0, seed=3, stop="e")
    wanted = llm.generate(PROMPTS, sampling)
    with LLM(folder, **ROOMY, tensor_parallel_size=2) as ranked:
        found = ranked.generate(PROMPTS, sampling)
    assert [output.outputs for output in found] == [output.outputs for output in wanted]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"block_size": 16, "cache": {"block_size": 32}}, "cache.block_size twice: 16, and 32 by cache"),
        ({"enable_prefix_caching": True, "prefix_caching": False}, "cache.prefix_caching twice: True, and False"),
        ({"enforce_eager": True, "backend.cuda_graphs": True}, "backend.cuda_graphs twice: False, and True"),
    ],
)
def test_one_thing_is_said_once(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM("tiny", **settings)
