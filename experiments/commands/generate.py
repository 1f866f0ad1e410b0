"""`testbed generate`: text from the command line. Owns the flags; generation is in real/text/generate.py."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from experiments.configuration.config import GROUPS
from experiments.configuration.overrides import refuse_repeated
from experiments.console import Parser
from experiments.llm_settings import SETTINGS
from experiments.runs.run_folder import alone, is_same_file, refuse_existing
from experiments.wiring.build_engine import real_packages
from real.text.generate import Asked, generate, read_prompts_file, sampling_of
from testbed.core.sampling import SamplingParams
from testbed.errors import ConfigError, RunFolderError

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
# a prompt that may be meant as a setting: a key, `=`, and no blanks; or what adds or deletes a key in `testbed run`
_LIKE_A_SETTING = re.compile(r"(\+{0,2}[a-z_]+(\.[a-z_]+)*=|~[a-z_]+\.)\S*$")
# without seed: --seed is the sampling seed of the prompts, not the engine's
ENGINE_FLAGS = tuple(name for name in SETTINGS if name not in ("dtype", "device", "seed", "enable_prefix_caching"))
MORE_FLAGS = ("tokenizer", "scheduler", "dtype", "device", "status_s", "enforce_eager", "enable_prefix_caching")


def main(arguments: list[str]) -> int:
    options = _parser().parse_intermixed_args(arguments)
    given = [item for item in options.items if _is_override(item)]
    refuse_repeated(given)
    overrides = dict(map(_override, given))
    prompts = [item for item in options.items if not _is_override(item)]
    for item in prompts:
        if _LIKE_A_SETTING.match(item):
            print(f"note: {item!r} is no setting, so it is taken as a prompt", file=sys.stderr)
    asked = [Asked(prompt, {}, f"prompt {index}") for index, prompt in enumerate(prompts)]
    if options.prompts_file is not None:
        asked += read_prompts_file(options.prompts_file)
    if not asked:
        lacks = f"{options.prompts_file} has no prompts; write one on each line"
        nothing = "nothing to generate from; give prompts in quotes, or --prompts-file"
        raise ConfigError(nothing if options.prompts_file is None else lacks)
    with _claimed(options.output, options.prompts_file, options.overwrite):
        return _generate(options, asked, overrides)


def _generate(options: argparse.Namespace, asked: list[Asked], overrides: dict[str, Any]) -> int:
    sampling = _given(options, *FLAGS, "stop", "ignore_eos")
    for one in asked:
        sampling_of(one, sampling, SamplingParams())  # reports values out of range before the model is loaded
    settings = _given(options, *ENGINE_FLAGS, *MORE_FLAGS)
    if both := [*settings.keys() & overrides.keys()]:
        raise ConfigError(f"--{both[0]} and {both[0]}={overrides[both[0]]} set the same thing; leave one of them out")
    with real_packages("testbed generate"):
        from experiments.text import LLM

        made = LLM(options.model, **settings, **overrides)
    if options.model == "tiny":
        print("note: tiny has random weights, made on the spot: its text is noise", file=sys.stderr)
    with made as llm:
        said, is_whole = generate(llm, asked, sampling, output=options.output, stream=options.stream, chat=options.chat)
        print(f"{said}, {llm.config.scheduler.name}, attention {llm.attention}", file=sys.stderr)
    return 0 if is_whole else 1


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "testbed generate",
        description="Generate text with a local model, under any scheduler and settings.",
        epilog="key=value sets a key of `testbed run` that text reads (of backend, scheduler, cache, model, device, "
        "cost; docs/generate.md), such as cache.block_size=32 or backend.num_threads=4. "
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
        engine.add_argument(f"--{name.replace('_', '-')}", type=_value, metavar="VALUE", help=SETTINGS[name])
    engine.add_argument("--enforce-eager", action="store_true", default=None, help="backend.cuda_graphs=false")
    return parser


def _is_override(item: str) -> bool:
    """Whether an argument is a setting: a key of the configuration followed by `=`. Everything else is a prompt."""
    key, equals, _ = item.partition("=")
    return bool(equals) and key.partition(".")[0] in (*GROUPS, "seed") and " " not in key


def _override(item: str) -> tuple[str, Any]:
    key, _, value = item.partition("=")
    if key == "model":
        raise ConfigError(f"{item!r}: give the model with --model")
    try:
        return key, _value(value)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{key} is {error}") from None


def _value(text: str) -> Any:
    """Returns a value that is written as YAML. Raises ArgumentTypeError if there is none: null would change nothing."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise argparse.ArgumentTypeError(f"{text!r}, which cannot be read as YAML") from None
    if value is None:
        raise argparse.ArgumentTypeError(f"{text!r}, which would change nothing; give a value, or leave it out")
    return value


@contextmanager
def _claimed(path: Path | None, prompts: Path | None, overwrite: bool) -> Iterator[None]:
    """Context that makes the output's folder and locks its file. Raises RunFolderError or OSError if the file cannot be
    written, before generating."""
    if path is None:
        yield
        return
    refuse_existing(path, overwrite, "--output")
    if prompts is not None and is_same_file(path, prompts):
        raise RunFolderError(f"{path} is the file of prompts; choose another --output")
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone(path, path, "--output"):
        yield
