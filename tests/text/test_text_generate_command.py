"""`testbed generate`: what it prints and writes, and its mistakes in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.commands import generate as command
from experiments.fidelity.fields import json_lines
from experiments.runs.interrupt import ended_as_interrupted
from experiments.runs.run_folder import alone
from experiments.text import LLM
from real.text import generate as text_generate
from testbed.core.sampling import SamplingParams
from testbed.errors import ConfigError, RequestError
from tests.experiments.kit import Said, say
from tests.text.kit import PROMPTS, greedy

SMALL = ("--device", "cpu", "cache.num_gpu_blocks=256", "cache.num_cpu_blocks=0", "cache.block_size=4")


def generate(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> Said:
    return say(capsys, "generate", "--model", str(folder), *SMALL, *arguments)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_one_prompt_prints_its_text_bare(
    capsys: pytest.CaptureFixture[str], folder: Path, llm: LLM, stream: tuple[str, ...]
) -> None:
    wanted = llm.generate(PROMPTS[0], greedy(9, ignore_eos=False))[0].outputs[0]
    said = generate(capsys, folder, PROMPTS[0], "--temperature", "0", "--max-tokens", "9", *stream)
    assert (said.status, said.out) == (0, wanted.text + "\n")
    assert said.lines[-1].startswith("1 prompt, 9 tokens generated in ")
    assert said.lines[-1].endswith(f"vllm_v1, attention {llm.attention}")


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_several_outputs_are_printed_in_order_under_their_prompts(
    capsys: pytest.CaptureFixture[str], folder: Path, llm: LLM, stream: tuple[str, ...]
) -> None:
    sampling = greedy(6, temperature=1.0, seed=3, n=2, ignore_eos=True)
    wanted = ""
    for index, output in enumerate(llm.generate(PROMPTS[:2], sampling)):
        for one in output.outputs:
            wanted += f"[{index}{'.1' if one.index else ''}] {PROMPTS[index]}\n{one.text}\n"
    flags = ("--max-tokens", "6", "--temperature", "1", "--seed", "3", "--n", "2", "--ignore-eos")
    said = generate(capsys, folder, *PROMPTS[:2], *flags, *stream, "scheduler.max_num_batched_tokens=16")
    assert said.out == wanted


def test_a_prompt_that_outgrows_the_memory_is_told_and_fails_the_command(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    sizes = ("--device", "cpu", "cache.num_gpu_blocks=2", "cache.num_cpu_blocks=0", "cache.block_size=4")
    given = ("--model", str(folder), *sizes, "--temperature", "0", "--ignore-eos")
    said = say(capsys, "generate", *given, "--max-tokens", "9", "a", "b")
    assert said.status == 1
    assert [line[:25] for line in said.lines[:2]] == ["error: prompt 0: 9 tokens", "error: prompt 1: 9 tokens"]
    assert said.lines[2].startswith("2 prompts, "), "the rest is generated"
    assert say(capsys, "generate", *given, "--max-tokens", "3", "a", "b").status == 0


def test_a_file_of_prompts_has_its_own_parameters_and_outputs_are_lines_of_json(
    capsys: pytest.CaptureFixture[str], folder: Path, llm: LLM, tmp_path: Path
) -> None:
    rows = [{"id": "a", "prompt": PROMPTS[1], "max_tokens": 2}, {"prompt_token_ids": [5, 6, 7], "stop": ["zz"]}]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "new" / "out.jsonl"
    prompts.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n" + '"Hello"\n')
    flags = ("--temperature", "0", "--max-tokens", "5", "--ignore-eos", "--logprobs", "1")
    said = generate(capsys, folder, "--prompts-file", str(prompts), "--output", str(out), *flags)
    assert (said.status, said.out) == (0, "")
    written = {line["index"]: line for line in lines_of(out)}
    wanted = llm.generate([PROMPTS[1], [5, 6, 7], "Hello"], [greedy(2), greedy(5), greedy(5)])
    for index, output in enumerate(wanted):
        (one,) = written[index]["outputs"]
        assert (one["token_ids"], one["text"]) == (output.outputs[0].token_ids, output.outputs[0].text)
        assert len(one["logprobs"]) == len(one["token_ids"])
        assert written[index]["prompt_token_ids"] == output.prompt_token_ids
    assert written[0]["id"] == "a"
    assert written[0]["prompt"] == PROMPTS[1]
    assert "exists; choose another --output" in generate(capsys, folder, "a", "--output", str(out)).error()
    assert generate(capsys, folder, "a", "--max-tokens", "1", "--output", str(out), "--overwrite").status == 0
    assert len(lines_of(out)) == 1


def test_a_row_has_logit_bias_in_the_form_of_openai(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"prompt": "a", "logit_bias": {"65": 100, "66": -100}}))
    flags = ("--prompts-file", str(prompts), "--output", str(out), "--temperature", "0", "--max-tokens", "3")
    assert generate(capsys, folder, *flags).status == 0
    assert lines_of(out)[0]["outputs"][0]["token_ids"] == [65, 65, 65]


def test_each_prompt_becomes_a_conversation_with_chat(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    text, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    text.write_text("hi\n\nyou\n", encoding="utf-8-sig")  # with the mark that editors on Windows write
    said = generate(capsys, folder, "--chat", "--prompts-file", str(text), "--output", str(out), "--max-tokens", "2")
    assert said.status == 0
    assert [line["prompt"] for line in lines_of(out)] == ["<user>hi<assistant>", "<user>you<assistant>"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_is_finished(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, out = text_generate._line, tmp_path / "out.jsonl"

    def pressed(*arguments: Any) -> str:
        signal.raise_signal(number)
        return write(*arguments)

    rows = [{"prompt": "a", "max_tokens": 3 + 40 * index} for index in range(3)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    real_done = iter([write, pressed])
    monkeypatch.setattr(text_generate, "_line", lambda *arguments: next(real_done)(*arguments))
    flags = ("--prompts-file", str(tmp_path / "p.jsonl"), "--output", str(out), "--ignore-eos")
    said = generate(capsys, folder, *flags)
    assert said.status == 130
    assert said.error() == f"interrupted after 2 of 3 prompts; what is finished is in {out}"
    assert [line["index"] for line in lines_of(out)] == [0, 1]


def test_sigterm_ends_where_ctrl_c_is_ignored() -> None:
    """As in the background job of a script."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), ended_as_interrupted():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, former)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_output_that_cannot_be_written_is_said_at_once(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("experiments.text.LLM")  # it is not even looked for
    error = generate(capsys, folder, "a", "--output", str(tmp_path), "--overwrite").error()
    assert error.startswith(f"{tmp_path}: Is a directory")


def test_while_one_command_writes_an_output_another_is_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, line, said = tmp_path / "out.jsonl", text_generate._line, []

    def beside(*arguments: Any) -> str:
        if not said:
            said.append(generate(capsys, folder, "b", "--output", str(out), "--overwrite").error())
        return line(*arguments)

    monkeypatch.setattr(text_generate, "_line", beside)
    assert generate(capsys, folder, "a", "--max-tokens", "2", "--output", str(out)).status == 0
    assert said == [f"another process is writing to {out}; wait for its end, or choose another --output"]
    assert [row["prompt"] for row in lines_of(out)] == ["a"]
    (link := tmp_path / "link.jsonl").symlink_to(tmp_path / "new.jsonl")
    with alone(link, link):
        assert link.exists()
    assert (link.is_symlink(), link.exists()) == (True, False), "of what nobody wrote nothing is left but the link"
    nowhere = Path(os.devnull)
    with alone(nowhere, nowhere), alone(nowhere, nowhere):
        pass
    assert nowhere.exists(), "many may write to a device at once"


LIMITED = """
import resource
from pathlib import Path
from real.text.generate import _written

resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
with _written(Path("out.jsonl")) as write:
    for _ in range(5):
        write("x" * 29)
"""


def test_a_full_disk_cuts_no_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "File too large: 'out.jsonl'" in done.stderr.splitlines()[-1]
    assert (tmp_path / "out.jsonl").read_text() == 3 * ("x" * 29 + "\n")


def test_a_missing_package_is_named_with_what_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    said = say(capsys, "generate", "--model", "tiny", "Hello")
    assert "testbed generate needs the package 'tokenizers': pip install '.[real]'" in said.error()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    error = generate(capsys, folder, "a", "--output", "/dev/full", "--overwrite").error()
    assert error == "the disk is full (/dev/full); free some space and run again"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "nothing to generate from; give prompts in quotes, or --prompts-file"),
        (("a", "--temperature", "-1"), "sampling.temperature is -1.0"),
        (("a", "cache.blok_size=4"), "did you mean 'cache.block_size'"),
        (("a", "sampling.temperature=0"), "sampling.temperature is of runs of traces; text takes SamplingParams(temp"),
        (("a", "sampling.logit_bias=[[5,2]]"), "with the prompts (`testbed generate`: a flag, or a row of --prompts-f"),
        (("a", "trace.rate=3"), "trace.rate is of runs of traces, and text does not read it; leave it out"),
        (("a", "backend=sim"), "backend=sim: text comes from the real engine only; leave it out"),
        (("a", "backend.options.x=1"), "backend.options.x is of runs of traces, and text does not read it"),
        (("a", "backend.dtype="), "backend.dtype is '', which would change nothing; give a value, or leave it out"),
        (("a", "--max-num-seqs", "[3"), "--max-num-seqs: '[3', which cannot be read as YAML"),
        (("a", "model=tiny"), "give the model with --model"),
        (("a", "--scheduler", "vlm_v1"), "did you mean 'vllm_v1'"),
        (("a", "--tokenizer", "nowhere"), "no tokenizer at nowhere"),
        (("",), "prompt 0 is empty"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in generate(capsys, folder, *arguments).error()


def test_a_setting_is_given_once() -> None:
    with pytest.raises(ConfigError, match="seed is given 2 times, and only the last would count; give it once"):
        command.main(["--model", "tiny", "a", "seed=1", "seed=2"])


@pytest.mark.parametrize("prompt", ["from=x", "+cache.block_size=8", "++seed=1", "~cache.block_size"])
def test_a_prompt_that_looks_like_a_setting_has_a_note(
    capsys: pytest.CaptureFixture[str], folder: Path, prompt: str
) -> None:
    said = generate(capsys, folder, prompt, "--max-tokens", "1")
    assert f"note: {prompt!r} is no setting, so it is taken as a prompt" in said.lines


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ', "p.jsonl:2: not JSON"),
        ("p.jsonl", "[1]", "p.jsonl:1: expected an object"),
        ("p.jsonl", '\n{"promt": "a"}', "p.jsonl:2: unknown key 'promt'; did you mean 'prompt'?"),
        ("p.jsonl", '{"prompt": ""}', "p.jsonl:1: the prompt is empty"),
        ("p.jsonl", '{"prompt": "a", "top_p": 2}', "p.jsonl:1: top_p is 2"),
        ("p.jsonl", '{"prompt": "a", "logit_bias": {"x": 5}}', "p.jsonl:1: logit_bias has the token 'x'"),
        ("p.jsonl", '{"prompt": "a", "logit_bias": {"5": 1, "05": 2}}', "p.jsonl:1: logit_bias names a token twice"),
        ("p.jsonl", '{"prompt": "a", "top_p": null}', "p.jsonl:1: top_p is null; it must be above 0"),
        ("p.jsonl", '{"prompt": "a", "n": 1, "n": 2}', "p.jsonl:1: field 'n' occurs twice; expected each name once"),
        ("p.jsonl", '{"prompt_token_ids": "abc"}', "p.jsonl:1 has prompt_token_ids 'abc'; they must be token ids"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": 5}', "p.jsonl:3 is 5; it must be a string, token ids, or a dict"),
        ("p.jsonl", '{"prompt_token_ids": [999999]}', "p.jsonl:1 has token id 999999; the model's vocabulary has ids"),
        ("p.txt", "\n\n", "p.txt has no prompts; write one on each line"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    assert says in generate(capsys, folder, "--prompts-file", str(tmp_path / name)).error()


def test_a_row_that_contradicts_a_flag_is_named_and_a_bad_flag_is_not_blamed_on_it() -> None:
    def said(row: dict[str, Any], **flags: Any) -> str:
        with pytest.raises(RequestError) as error:
            text_generate.sampling_of(text_generate.Asked("a", row, "p.jsonl:2"), flags, SamplingParams())
        return str(error.value)

    most = "min_tokens is 5; it must be at most max_tokens (3)"
    assert said({"max_tokens": 3}, min_tokens=5) == f"p.jsonl:2: {most}"
    assert said({"best_of": 2}, beam_width=2).startswith("p.jsonl:2: best_of and beam_width exclude")
    assert said({"top_k": 3}, min_tokens=5, max_tokens=3) == f"sampling.{most}"


def test_a_line_of_a_file_ends_at_line_feeds_only(tmp_path: Path) -> None:
    texts = ["a\u2028b", "c\x0cd", "e\x85f"]  # str.splitlines ends a line at each of these
    (tmp_path / "p.txt").write_bytes("\r\n".join(texts).encode())
    rows = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in texts)
    (tmp_path / "p.jsonl").write_text(rows)
    assert [asked.prompt for asked in text_generate.read_prompts_file(tmp_path / "p.txt")] == texts
    asked = text_generate.read_prompts_file(tmp_path / "p.jsonl")
    assert [(one.prompt["prompt"], one.place.rpartition(":")[2]) for one in asked] == [*zip(texts, "123", strict=True)]
    assert [fields.values for fields in json_lines(rows, tmp_path)] == [{"prompt": text} for text in texts]


def test_files_that_are_not_there_or_not_text(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    assert (
        f"--prompts-file {missing} cannot be read: No such file"
        in generate(capsys, folder, "--prompts-file", str(missing)).error()
    )
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    said = generate(capsys, folder, "--prompts-file", str(tmp_path / "binary.txt"))
    assert "not UTF-8 text (at byte 0)" in said.error()
    assert "no model at" in say(capsys, "generate", "--model", str(missing), "a").error()


def test_an_output_is_not_lost_before_there_is_another(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    out, prompts = tmp_path / "out.jsonl", tmp_path / "p.jsonl"
    out.write_text("old\n")
    said = generate(capsys, folder, "a b c d", "--output", str(out), "--overwrite", "--max-model-len", "2")
    assert said.error().startswith("prompt 0 has ")
    assert out.read_text() == "old\n"
    new = tmp_path / "new.jsonl"
    assert generate(capsys, folder, "a b c d", "--output", str(new), "--max-model-len", "2").status == 1
    assert not new.exists()
    prompts.write_text('{"prompt": "a"}\n')
    said = generate(capsys, folder, "--prompts-file", str(prompts), "--output", str(prompts), "--overwrite")
    assert said.error() == f"{prompts} is the file of prompts; choose another --output"
    assert prompts.read_text() == '{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("arguments", "both"),
    [
        (("--num-gpu-blocks", "9"), "LLM was given cache.num_gpu_blocks twice: 9, and 256 by cache.num_gpu_blocks"),
        (("--scheduler", "vllm_v0", "scheduler=nano_vllm"), "--scheduler and scheduler=nano_vllm set the same thing"),
        (
            ("--enable-prefix-caching", "cache.prefix_caching=true"),
            "LLM was given cache.prefix_caching twice: True, and",
        ),
        (
            ("--num-gpu-blocks-override", "5"),
            "LLM was given cache.num_gpu_blocks twice: 5, and 256 by cache.num_gpu_block",
        ),
        (
            ("--enforce-eager", "backend.cuda_graphs=true"),
            "LLM was given backend.cuda_graphs twice: False, and True by",
        ),
    ],
)
def test_one_thing_is_set_in_one_way(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: tuple[str, ...], both: str
) -> None:
    error = generate(capsys, folder, "a", *arguments).error()
    assert error.startswith(both)
    assert error.endswith("; leave one of them out")


def test_half_a_character_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, llm: LLM
) -> None:
    assert (
        generate(capsys, folder, "Hi \udcff there").error().startswith("prompt 0 has half a character, \\udcff, at 3")
    )
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi", "id": "x\\ud800"}')
    said = generate(capsys, folder, "--prompts-file", str(tmp_path / "p.jsonl"))
    assert "p.jsonl:1: half a character, \\ud800, after 'x'" in said.error()
    with pytest.raises(RequestError, match="conversation 0 has half a character"):
        llm.chat([{"role": "user", "content": "a\ud800"}], chat_template="{{ messages[0]['content'] }}")


def test_the_arguments_of_llm_are_flags(
    capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Stopped(LLM):
        def __init__(self, model: str, **settings: Any) -> None:
            seen.update(settings)
            super().__init__(model, **settings)

    monkeypatch.setattr("experiments.text.LLM", Stopped)
    flags = ["--max-model-len", "8", "--enforce-eager", "--no-enable-prefix-caching", "--swap-space", "0.5"]
    said = generate(capsys, folder, "a prompt that is too long for eight tokens of context", *flags)
    assert said.status == 1
    assert said.lines[-1].startswith("error: prompt 0")
    assert "max_model_len (8)" in said.lines[-1]
    wanted = {"max_model_len": 8, "enforce_eager": True, "enable_prefix_caching": False, "swap_space": 0.5}
    assert wanted.items() <= seen.items()
    assert "prefix_caching" not in seen, "what is not given is left as it is"
    said = generate(capsys, folder, "a", "--gpu-memory-utilization", "2")
    assert said.lines[-1] == "error: cache.gpu_memory_utilization is 2.0; it must be in (0, 1]"
