"""`testbed generate`: text from the command line. Owns its flags, and how outputs are written."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import yaml

from experiments.config import GROUPS
from experiments.interrupt import terminated_as_interrupted
from experiments.llm_settings import SETTINGS
from experiments.printer import Printer
from experiments.prompts_file import Asked, read_prompts_file
from experiments.run_folder import is_same_file
from real.text.interrupt import deferred
from testbed.core.sampling import SamplingParams
from testbed.errors import ConfigError, RequestError, RunFolderError

if TYPE_CHECKING:
    from experiments.llm import LLM
    from real.text.outputs import Piece, RequestOutput

FLAGS: dict[str, tuple[Any, str]] = {  # a field of SamplingParams -> the type of its flag, help
    "max_tokens": (int, "tokens for each output (the model's generation_config.json, else 16)"),
    "temperature": (float, "0 is greedy (the model's, else 1)"),
    "top_p": (float, "draw from the likeliest tokens of this total probability"),
    "top_k": (int, "draw from this many of the likeliest tokens"),
    "min_p": (float, "draw from tokens at least this share as likely as the likeliest"),
    "presence_penalty": (float, "taken off tokens that were emitted"),
    "frequency_penalty": (float, "the same, for each time"),
    "repetition_penalty": (float, "divides the logits of tokens in prompt and output"),
    "min_tokens": (int, "tokens before anything may end an output"),
    "n": (int, "outputs of each prompt"),
    "best_of": (int, "draw as many, return the n best"),
    "beam_width": (int, "beam search over as many beams"),
    "logprobs": (int, "log-probabilities of each token and of as many of the likeliest (in --output)"),
    "seed": (int, "of the draws of each prompt"),
}
# what was meant as a setting, perhaps: a key, `=`, and no blanks
_LIKE_A_SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)*=\S*$")
# --seed is that of the draws
ENGINE_FLAGS = tuple(name for name in SETTINGS if name not in ("dtype", "device", "seed", "enable_prefix_caching"))
_FLAG_KEYS = {"scheduler": "scheduler", "enforce_eager": "backend.cuda_graphs", **SETTINGS}  # which each flag sets


def main(arguments: list[str]) -> int:
    """Returns the exit status. Raises TestbedError in one line."""
    options = _parser().parse_intermixed_args(arguments)
    overrides = dict(_override(item) for item in options.items if _is_override(item))
    prompts = [item for item in options.items if not _is_override(item)]
    if overrides.get("backend", "real") != "real":
        raise ConfigError(f"backend={overrides['backend']}: text comes from the real engine only; leave it out")
    for item in prompts:
        if _LIKE_A_SETTING.match(item):
            print(f"note: {item!r} is no setting, so it is taken as a prompt", file=sys.stderr)
    asked = [Asked(prompt, {}, f"prompt {index}") for index, prompt in enumerate(prompts)]
    if options.prompts_file is not None:
        asked += read_prompts_file(options.prompts_file)
    if not asked:
        raise ConfigError("nothing to generate from; give prompts in quotes, or --prompts-file")
    if options.output is not None and options.output.exists() and not options.overwrite:
        raise RunFolderError(f"{options.output} exists; choose another --output or pass --overwrite")
    if (
        options.output is not None
        and options.prompts_file is not None
        and is_same_file(options.output, options.prompts_file)
    ):
        raise RunFolderError(f"{options.output} is the file of prompts; choose another --output")
    if options.output is not None:
        _check_writable(options.output)
    for one in asked:
        _sampling(SamplingParams(), options, one)  # what is out of range is said before a model is loaded
    from experiments.llm import LLM

    if options.model == "tiny":
        print("note: tiny has random weights, made on the spot: its text is noise", file=sys.stderr)
    names = (
        "tokenizer",
        "scheduler",
        "dtype",
        "device",
        "status_s",
        "enforce_eager",
        "enable_prefix_caching",
        *ENGINE_FLAGS,
    )
    flags = {name: getattr(options, name) for name in names}
    settings = {name: value for name, value in flags.items() if value is not None}
    _refuse_both(settings, overrides)
    with terminated_as_interrupted(), LLM(options.model, **settings, **overrides) as llm:
        _generate(llm, asked, options)
    return 0


def _refuse_both(flags: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Raises ConfigError for a setting that is given as a flag and as key=value: which one is meant is not guessed."""
    for name in flags:
        key = _FLAG_KEYS.get(name)
        if key in overrides:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} and {key}={overrides[key]} set the same thing; leave one of them out")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "testbed generate",
        description="Generate text with a local model, under any scheduler and settings.",
        epilog="key=value sets any key of `testbed run`, such as cache.block_size=32 or backend.num_threads=4. "
        "A first try needs no model: testbed generate --model tiny 'Hello'",
    )
    parser.add_argument("items", nargs="*", metavar="prompt | key=value", help="prompts in quotes; settings")
    parser.add_argument("--model", required=True, help="a folder in Hugging Face's layout; tiny: random weights")
    parser.add_argument("--prompts-file", type=Path, metavar="FILE", help=".txt: one a line; .jsonl: docs/generate.md")
    parser.add_argument("--output", type=Path, metavar="FILE", help="a line of JSON for each prompt, as it is finished")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file if it exists")
    parser.add_argument("--stream", action="store_true", help="print text as it comes")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="instead of the model's own")
    parser.add_argument("--scheduler", help="a preset of `testbed list scheduler` (vllm_v1)")
    parser.add_argument("--device", help="auto, cuda, cpu")
    parser.add_argument("--dtype", help="bfloat16, float16, float32 (the model's)")
    parser.add_argument("--status-s", type=float, metavar="S", help="a status line every so many seconds")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end an output before this text; repeatable")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the model's end token")
    for name, (kind, says) in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=says)
    engine = parser.add_argument_group("engine", "the arguments of LLM, each with the key that it sets")
    engine.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, help="cache.prefix_caching, as vLLM has it"
    )
    for name in ENGINE_FLAGS:
        engine.add_argument(f"--{name.replace('_', '-')}", type=yaml.safe_load, metavar="VALUE", help=SETTINGS[name])
    engine.add_argument("--enforce-eager", action="store_true", default=None, help="backend.cuda_graphs=false")
    return parser


def _is_override(item: str) -> bool:
    """Whether an argument is a setting: a key of the configuration and `=`. Everything else is a prompt."""
    key, equals, _ = item.partition("=")
    return bool(equals) and key.partition(".")[0] in (*GROUPS, "seed") and " " not in key


def _override(item: str) -> tuple[str, Any]:
    key, _, value = item.partition("=")
    if key == "model":
        raise ConfigError(f"{item!r}: give the model with --model")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"{item!r}: the value cannot be read") from None


def _sampling(base: SamplingParams, options: argparse.Namespace, asked: Asked) -> SamplingParams:
    """The model's recommendation, then the flags, then the row's own."""
    flags = {name: getattr(options, name) for name in (*FLAGS, "stop", "ignore_eos")}
    chosen = {name: value for name, value in flags.items() if value is not None} | asked.sampling
    try:
        return replace(base, **chosen)
    except RequestError as error:
        raise RequestError(f"{asked.place}: {error}" if asked.sampling else str(error)) from None


# --- generating ---


def _generate(llm: LLM, asked: list[Asked], options: argparse.Namespace) -> None:
    base = llm.get_default_sampling_params()
    sampling = [_sampling(base, options, one) for one in asked]
    is_bare = len(asked) == 1 and sampling[0].n == 1
    printer = Printer(None if is_bare else [_label(one) for one in asked], _write_out)
    num_done, num_tokens, began = 0, 0, time.monotonic()

    def shown(piece: Piece) -> None:
        printer.add(piece.index, piece.output_index, piece.text, piece.finished)

    with _written(options.output) as write:

        def done(index: int, output: RequestOutput) -> None:
            nonlocal num_done, num_tokens
            if write is not None:
                with deferred():  # a line is written whole
                    write(_line(index, asked[index], output))
                    num_done += 1
            elif not options.stream:
                for one in output.outputs:
                    printer.add(index, one.index, one.text, True)
            num_done += write is None
            num_tokens += sum(len(one.token_ids) for one in output.outputs)
            printer.close(index, len(output.outputs))
            if output.message:
                print(f"note: {asked[index].place}: {output.message}", file=sys.stderr)

        call: dict[str, Any] = {
            "use_tqdm": not options.stream, "on_piece": shown if options.stream else None, "on_output": done
        }  # fmt: skip
        try:
            if options.chat:
                llm.chat([_messages(one) for one in asked], sampling, **call)
            else:
                llm.generate([one.prompt for one in asked], sampling, **call)
        except KeyboardInterrupt:
            printer.flush()
            kept = f"; what is finished is in {options.output}" if num_done and options.output is not None else ""
            raise KeyboardInterrupt(f"interrupted after {num_done} of {len(asked)} prompts{kept}") from None
    span_s = time.monotonic() - began
    print(
        f"{len(asked)} prompts, {num_tokens:,} tokens generated in {span_s:.2f} s ({num_tokens / span_s:,.1f} tok/s), "
        f"{llm.config.scheduler.name}, attention {llm.attention}",
        file=sys.stderr,
    )


def _messages(asked: Asked) -> list[dict[str, str]]:
    text = asked.prompt.get("prompt") if isinstance(asked.prompt, dict) else asked.prompt
    if not isinstance(text, str):
        raise RequestError(f"{asked.place}: --chat needs a text, not token ids")
    return [{"role": "user", "content": text}]


def _check_writable(path: Path) -> None:
    """Makes its folder. Raises OSError before anything is computed for a file that could not be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    path.open("a").close()
    if is_new:
        path.unlink()


@contextmanager
def _written(path: Path | None) -> Iterator[Callable[[str], None] | None]:
    """Writes lines, each at once whole: what is finished is kept whatever comes."""
    if path is None:
        yield None
        return
    with ExitStack() as stack:
        opened: list[TextIO] = []  # at the first line: what is refused before leaves an older file as it is

        def write(line: str) -> None:
            if not opened:
                opened.append(stack.enter_context(path.open("w", encoding="utf-8")))
            opened[0].write(line + "\n")
            opened[0].flush()

        yield write


def _line(index: int, asked: Asked, output: RequestOutput) -> str:
    values = asdict(output)
    named = {"index": index} | ({} if asked.id is None else {"id": asked.id})
    return json.dumps(
        named | {key: value for key, value in values.items() if value not in (None, "")}, ensure_ascii=False
    )


def _label(asked: Asked) -> str:
    prompt = asked.prompt
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt") or prompt.get("prompt_token_ids")
    text = " ".join(prompt.split()) if isinstance(prompt, str) else f"{len(prompt)} token ids"
    return text if len(text) <= 72 else f"{text[:69]}..."


def _write_out(text: str) -> None:
    if sys.stdout is None:  # closed by the caller (>&-); what --output names is written all the same
        return
    sys.stdout.write(text)
    sys.stdout.flush()
