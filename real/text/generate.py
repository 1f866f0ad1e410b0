"""What `testbed generate` does with its prompts: texts to standard output as they come, or to a file as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from real.text.interrupt import deferred
from real.text.llm import LLM
from real.text.outputs import Piece, RequestOutput
from real.text.printer import Printer
from real.text.prompts_file import Asked
from testbed.core.sampling import SamplingParams
from testbed.errors import RequestError


def sampling_of(asked: Asked, flags: dict[str, Any], base: SamplingParams) -> SamplingParams:
    """The model's recommendation, then the flags, then the row's own. Raises RequestError naming the row."""
    try:
        return replace(base, **(flags | asked.sampling))
    except RequestError as error:
        raise RequestError(f"{asked.place}: {error}" if asked.sampling else str(error)) from None


def generate(
    llm: LLM, asked: list[Asked], flags: dict[str, Any], *, output: Path | None, stream: bool, chat: bool
) -> str:
    """Generates for all prompts, and returns one line on how much and how fast.

    flags: parameters of SamplingParams for every prompt. output: a file, instead of standard output. stream: print text
    as it comes. chat: put each prompt into the model's chat template. Ctrl-C keeps what is finished.
    """
    base = llm.get_default_sampling_params()
    sampling = [sampling_of(one, flags, base) for one in asked]
    is_bare = len(asked) == 1 and sampling[0].n == 1
    printer = Printer(None if is_bare else [_label(one) for one in asked], _write_out)
    num_done, num_tokens, began = 0, 0, time.monotonic()

    def shown(piece: Piece) -> None:
        printer.add(piece.index, piece.output_index, piece.text, piece.finished)

    with _written(output) as write:

        def done(index: int, came: RequestOutput) -> None:
            nonlocal num_done, num_tokens
            if write is not None:
                with deferred():  # a line is written whole
                    write(_line(index, asked[index], came))
                    num_done += 1
            elif not stream:
                for one in came.outputs:
                    printer.add(index, one.index, one.text, True)
            num_done += write is None
            num_tokens += sum(len(one.token_ids) for one in came.outputs)
            printer.close(index, len(came.outputs))
            if came.message:
                print(f"note: {asked[index].place}: {came.message}", file=sys.stderr)

        call: dict[str, Any] = {
            "use_tqdm": not stream, "on_piece": shown if stream else None, "on_output": done
        }  # fmt: skip
        try:
            if chat:
                llm.chat([_messages(one) for one in asked], sampling, **call)
            else:
                llm.generate([one.prompt for one in asked], sampling, **call)
        except KeyboardInterrupt:
            printer.flush()
            kept = f"; what is finished is in {output}" if num_done and output is not None else ""
            raise KeyboardInterrupt(f"interrupted after {num_done} of {_counted(len(asked), 'prompt')}{kept}") from None
    span_s = time.monotonic() - began
    said = f"{_counted(len(asked), 'prompt')}, {_counted(num_tokens, 'token')} generated in {span_s:.2f} s"
    return f"{said} ({num_tokens / span_s:,.1f} tok/s)"


def _counted(num: int, what: str) -> str:
    return f"{num:,} {what}{'' if num == 1 else 's'}"


def _messages(asked: Asked) -> list[dict[str, str]]:
    text = asked.prompt.get("prompt") if isinstance(asked.prompt, dict) else asked.prompt
    if not isinstance(text, str):
        raise RequestError(f"{asked.place}: --chat needs a text, not token ids")
    return [{"role": "user", "content": text}]


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
