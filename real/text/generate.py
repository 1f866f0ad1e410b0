"""`testbed generate`: reads prompts, possibly from a file (one text per line, or JSON rows with sampling parameters of
their own), and writes texts to standard output as they grow, or to a file as JSON lines.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from real.text.engine import deferred
from real.text.llm import LLM
from real.text.outputs import Piece, RequestOutput
from real.text.prompts import KEYS
from testbed.core.sampling import SamplingParams
from testbed.errors import RequestError, TraceError
from testbed.foreign_text import unknown
from testbed.traces.readers.fields import json_value
from testbed.wording import count

SAMPLING_KEYS = tuple(item.name for item in fields(SamplingParams))
ROW_KEYS = ("id", *KEYS, *SAMPLING_KEYS)


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of the command line or of a file. sampling: parameters that its row sets. place: for messages."""

    prompt: Any
    sampling: dict[str, Any]
    place: str
    id: str | None = None


def read_prompts_file(file: Path) -> list[Asked]:
    """Reads the prompts of a file: one JSON row per line of .jsonl or .json, one text per line of any other file.

    `-` is standard input, as text. Empty lines are skipped. Raises RequestError naming the file, and the line if one
    is bad.
    """
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not UTF-8 text (at byte {error.start})") from None
    except OSError as error:
        raise RequestError(f"--prompts-file {file} cannot be read: {error.strerror}") from None
    lines = enumerate(text.split("\n"), 1)  # splitlines would also end one at U+2028 or a form feed
    rows = [(f"{file}:{number}", line) for number, line in lines if line.strip()]
    if file.suffix in (".jsonl", ".json"):
        return [_json_row(place, line) for place, line in rows]
    return [Asked(line, {}, place) for place, line in rows]


def _json_row(place: str, line: str) -> Asked:
    try:
        row = json_value(line, place)
    except TraceError as error:
        raise RequestError(str(error)) from None
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise RequestError(f"{place}: expected an object with prompt or prompt_token_ids")
    for key in row:
        if key not in ROW_KEYS:
            raise RequestError(unknown(f"{place}: unknown key {key!r}", key, ROW_KEYS))
    if not row.get("prompt") and not row.get("prompt_token_ids"):
        raise RequestError(f"{place}: the prompt is empty; give prompt or prompt_token_ids")
    if isinstance(bias := row.get("logit_bias"), dict):  # OpenAI's form: keys of JSON are strings
        row["logit_bias"] = [(int(key) if re.fullmatch("[0-9]{1,10}", key) else key, bias[key]) for key in bias]
    prompt = {key: row[key] for key in KEYS if key in row}
    return Asked(prompt, {key: row[key] for key in SAMPLING_KEYS if key in row}, place, row.get("id"))


def sampling_of(asked: Asked, flags: dict[str, Any], base: SamplingParams) -> SamplingParams:
    """Combines parameters: those of the row override the flags, which override the model's recommendation (base).
    Raises RequestError naming the row."""
    try:
        return replace(base, **(flags | asked.sampling))
    except RequestError as error:
        said = str(error)
        is_of_row = not asked.sampling.keys().isdisjoint(re.findall(r"\w+", said))  # a row has only its key
        raise RequestError(f"{asked.place}: {said.replace('sampling.', '')}" if is_of_row else said) from None


def generate(
    llm: LLM, asked: list[Asked], flags: dict[str, Any], *, output: Path | None, stream: bool, chat: bool
) -> tuple[str, bool]:
    """Generates for all prompts; returns one line with the numbers of prompts and tokens, and the throughput, and
    whether no prompt was ignored.

    flags: parameters of SamplingParams for every prompt. output: a file, instead of standard output. stream: print text
    as it grows. chat: put each prompt into the model's chat template. After Ctrl-C, finished outputs are kept.
    """
    base = llm.get_default_sampling_params()
    sampling = [sampling_of(one, flags, base) for one in asked]
    is_bare = len(asked) == 1 and sampling[0].n == 1
    printer = Printer(None if is_bare else [_label(one) for one in asked], _write_out)
    num_done, num_tokens, num_ignored, began = 0, 0, 0, time.monotonic()

    def shown(piece: Piece) -> None:
        printer.add(piece.index, piece.output_index, piece.text, piece.finished)

    with _written(output) as write:

        def done(index: int, came: RequestOutput) -> None:
            nonlocal num_done, num_tokens, num_ignored
            if write is not None:
                with deferred():  # so that Ctrl-C cannot cut a line
                    write(_line(index, asked[index], came))
                    num_done += 1
            elif not stream:
                for one in came.outputs:
                    printer.add(index, one.index, one.text, True)
            num_done += write is None
            num_tokens += sum(len(one.token_ids) for one in came.outputs)
            printer.close(index, len(came.outputs))
            if came.message:
                num_ignored += 1
                print(f"error: {asked[index].place}: {came.message}", file=sys.stderr)

        call: dict[str, Any] = {"use_tqdm": not stream, "on_piece": shown if stream else None, "on_output": done}
        try:
            if chat:
                llm.chat([_messages(one) for one in asked], sampling, **call)
            else:
                llm.generate([one.prompt for one in asked], sampling, **call)
        except KeyboardInterrupt:
            printer.flush()
            kept = f"; what is finished is in {output}" if num_done and output is not None else ""
            raise KeyboardInterrupt(f"interrupted after {num_done} of {count(len(asked), 'prompt')}{kept}") from None
        except RequestError as error:
            raise RequestError(_placed(str(error), asked)) from None
    span_s = time.monotonic() - began
    said = f"{count(len(asked), 'prompt')}, {count(num_tokens, 'token')} generated in {span_s:.2f} s"
    return f"{said} ({num_tokens / span_s:,.1f} tok/s)", not num_ignored


def _messages(asked: Asked) -> list[dict[str, str]]:
    text = asked.prompt.get("prompt") if isinstance(asked.prompt, dict) else asked.prompt
    if not isinstance(text, str):
        raise RequestError(f"{asked.place}: --chat needs a string, not token ids")
    return [{"role": "user", "content": text}]


@contextmanager
def _written(path: Path | None) -> Iterator[Callable[[str], None] | None]:
    """Gives a function that writes and flushes one whole line, so that finished outputs are kept whatever happens; a
    line that a full disk cuts is removed."""
    if path is None:
        yield None
        return
    opened: list[BinaryIO] = []  # opened at the first line: an earlier error leaves an older file unchanged
    num_bytes = 0

    def write(line: str) -> None:
        nonlocal num_bytes
        if not opened:
            opened.append(path.open("wb"))
        try:
            num_new = opened[0].write(f"{line}\n".encode())
            opened[0].flush()
        except OSError as error:
            error.filename = str(path)
            raise
        num_bytes += num_new

    try:
        yield write
    finally:
        for file in opened:
            with suppress(OSError):  # what was not written was told then
                file.close()
            with suppress(OSError):  # a device
                os.truncate(path, num_bytes)


def _line(index: int, asked: Asked, output: RequestOutput) -> str:
    values = asdict(output)
    named = {"index": index} | ({} if asked.id is None else {"id": asked.id})
    return json.dumps(
        named | {key: value for key, value in values.items() if value not in (None, "")}, ensure_ascii=False
    )


def _placed(said: str, asked: list[Asked]) -> str:
    """The message, with the place of a prompt instead of its number."""
    numbered = re.match(r"prompt (\d+)\b", said)
    return said if numbered is None else asked[int(numbered[1])].place + said[numbered.end() :]


def _label(asked: Asked) -> str:
    prompt = asked.prompt
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt") or prompt.get("prompt_token_ids")
    if isinstance(prompt, list):
        return f"{len(prompt)} token ids"
    text = " ".join(str(prompt).split())
    return text if len(text) <= 72 else f"{text[:69]}..."


def _write_out(text: str) -> None:
    if sys.stdout is None:  # closed by the caller (>&-); the --output file is still written
        return
    sys.stdout.write(text)
    sys.stdout.flush()


class Printer:
    """Prints texts in the order of prompts and outputs: the first unfinished text as it grows, the others later.

    labels: a line above each text; None if there is only one text, which is printed without a label.
    """

    def __init__(self, labels: list[str] | None, write: Callable[[str], object]) -> None:
        self._labels = labels
        self._write = write
        self._texts: dict[tuple[int, int], list[str]] = {}  # not printed yet, by (prompt, output)
        self._over: dict[tuple[int, int], None] = {}
        self._num_outputs: dict[int, int] = {}  # of finished prompts
        self._at = (0, 0)
        self._has_begun = False

    def add(self, index: int, place: int, text: str, is_over: bool) -> None:
        self._texts.setdefault((index, place), []).append(text)
        if is_over:
            self._over[index, place] = None
        self._print()

    def close(self, index: int, num_outputs: int) -> None:
        """Records that all outputs of a prompt are finished."""
        self._num_outputs[index] = num_outputs
        self._print()

    def flush(self) -> None:
        """Prints the texts that wait for an earlier text which will not be finished."""
        if self._has_begun:
            self._end()
        for at in sorted(self._texts):
            self._at = at
            self._begin()
            self._end()

    def _print(self) -> None:
        while True:
            index, place = self._at
            if place >= self._num_outputs.get(index, place + 1):
                self._at = (index + 1, 0)
            elif self._at in self._texts:
                self._begin()
                if self._at not in self._over:
                    return
                self._end()
                self._at = (index, place + 1)
            else:
                return

    def _begin(self) -> None:
        """Prints the current text's label, if it is not printed yet, and the text so far."""
        index, place = self._at
        if not self._has_begun and self._labels is not None:
            self._write(f"[{index}{f'.{place}' if place else ''}] {self._labels[index]}\n")
        self._has_begun = True
        self._write("".join(self._texts[self._at]))
        self._texts[self._at].clear()

    def _end(self) -> None:
        self._write("\n")
        self._texts.pop(self._at, None)
        self._has_begun = False
