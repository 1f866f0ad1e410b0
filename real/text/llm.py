"""A backend, the core and a tokenizer as one object that generates text. Its parts are passed in; it reads no
configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from real.text.collector import NewText
from real.text.engine import TextEngine
from real.text.outputs import Piece, RequestOutput, TextRequest
from real.text.prompts import Prompt, check_text, read_prompts
from real.text.sampling import default_sampling
from real.text.status import StatusLine, ThroughputBar
from real.text.tokenizer import Message, Tokenizer
from testbed.core.commands import Recorder
from testbed.core.request import Request
from testbed.core.sampling import SamplingParams as AnySamplingParams
from testbed.core.scheduler import Scheduler
from testbed.errors import RequestError
from testbed.foreign_text import shown
from testbed.seeds import needs_seed, request_seed

Sampling = AnySamplingParams | Sequence[AnySamplingParams] | None
Prompts = Any  # a text, token ids, a dict with prompt or prompt_token_ids; or a list of any of them


class LLM:
    """A model that generates text. The model, its prefix cache, clock and step counters stay from call to call.

    scheduler, backend: of one composition; the LLM owns the backend and closes it. tokenizer: None leaves texts empty.
    eos_ids: tokens that end a text. seed: from which requests without a seed derive theirs. folder: that of the
    checkpoint, whose recommended sampling is the default; None: no checkpoint. status_s: seconds between status lines
    on standard error; None: no status lines.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Any,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_ids: Sequence[int] = (),
        seed: int = 0,
        folder: Path | None = None,
        status_s: float | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._backend = backend
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._seed = seed
        self._folder = folder
        self._status_s = status_s
        self._num_requests = 0
        self._num_gpu_blocks: int = backend.num_gpu_blocks
        self._engine: TextEngine | None = TextEngine(scheduler, backend, tokenizer, eos_ids=frozenset(eos_ids))

    # --- generating ---

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        on_piece: Callable[[Piece], object] | None = None,
        on_output: Callable[[int, RequestOutput], object] | None = None,
    ) -> list[RequestOutput]:
        """Returns the outputs of all prompts, in the order of the prompts.

        sampling_params: one for all prompts, or one for each; None: get_default_sampling_params(). on_piece: called
        with what each step added to each sequence. on_output: called with the index and the output of a prompt when it
        is finished. Ctrl-C aborts the remaining requests; the LLM stays usable.
        """
        requests = self._requests(read_prompts(prompts, self.tokenizer), sampling_params)
        return self._generate(requests, use_tqdm, on_piece, on_output)

    def stream(self, prompts: Prompts, sampling_params: Sampling = None) -> Iterator[Piece]:
        """Yields the pieces of all prompts as they come. Closing the iterator aborts the remaining requests."""
        return self._stream(self._requests(read_prompts(prompts, self.tokenizer), sampling_params))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        on_piece: Callable[[Piece], object] | None = None,
        on_output: Callable[[int, RequestOutput], object] | None = None,
        chat_template: str | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them: messages with `role` and `content`.

        template_options: passed to the chat template, such as enable_thinking=False.
        """
        if self.tokenizer is None:
            raise RequestError("the model's folder has no tokenizer, and so no chat template; pass tokenizer=<folder>")
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise RequestError(f"messages is {shown(messages)}; give dicts with role and content, or lists of them")
        is_one = all(isinstance(item, Mapping) for item in messages)
        conversations: Any = [messages] if is_one and messages else messages
        prompts = []
        for index, conversation in enumerate(conversations):
            if not conversation:
                raise RequestError(f"conversation {index} is empty; give it at least one message")
            if not isinstance(conversation, Sequence) or isinstance(conversation, str):
                raise RequestError(f"conversation {index} is {shown(conversation)}; give a list of messages")
            text = self.tokenizer.chat(conversation, chat_template=chat_template, **template_options)
            check_text(text, f"conversation {index}")
            prompts.append(Prompt(text, self.tokenizer.encode(text, add_special_tokens=False)))
        return self._generate(self._requests(prompts, sampling_params), use_tqdm, on_piece, on_output)

    def get_default_sampling_params(self) -> AnySamplingParams:
        """Returns the recommendation of the checkpoint's generation_config.json; defaults: temperature 1, 16 tokens."""
        return default_sampling(self._folder)

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache, so that each measurement begins in the same state."""
        self._running().scheduler.reset_prefixes()

    # --- properties and end ---

    @property
    def num_gpu_blocks(self) -> int:
        return self._num_gpu_blocks

    @property
    def attention(self) -> str:
        """The name of the attention provider that was chosen."""
        return str(self._backend.attention_name)

    @property
    def scheduler(self) -> Any:
        """The core's scheduler, for inspection."""
        return self._running().scheduler

    def close(self) -> None:
        """Frees the model, its memory and its processes. The LLM cannot be used afterwards."""
        backend, self._backend, self._engine = self._backend, None, None
        if backend is not None:
            backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---

    def _running(self) -> TextEngine:
        if self._engine is None:
            raise RequestError("this LLM is closed; make a new one")
        return self._engine

    def _generate(
        self,
        requests: list[TextRequest],
        use_tqdm: bool,
        on_piece: Callable[[Piece], object] | None,
        on_output: Callable[[int, RequestOutput], object] | None,
    ) -> list[RequestOutput]:
        places = {asked.request.request_id: asked.index for asked in requests}
        outputs: dict[int, RequestOutput] = {}
        bar = ThroughputBar(len(requests)) if use_tqdm else None
        try:
            with closing(self._serve(requests, on_piece is not None, [] if bar is None else [bar])) as steps:
                for new in steps:
                    if on_piece is not None:
                        for piece in new.pieces:
                            on_piece(piece)
                    for output in new.outputs:
                        place = places[output.request_id]
                        outputs[place] = output
                        if on_output is not None:
                            on_output(place, output)
        finally:
            if bar is not None:
                bar.close()
        return [outputs[place] for place in range(len(requests))]

    def _stream(self, requests: list[TextRequest]) -> Iterator[Piece]:
        with closing(self._serve(requests, True, [])) as steps:
            for new in steps:
                yield from new.pieces

    def _serve(
        self, requests: list[TextRequest], streams: bool, watchers: list[Recorder]
    ) -> Generator[NewText, None, None]:
        engine = self._running()
        if self._status_s is not None:
            watchers = [*watchers, StatusLine(self._status_s, engine.scheduler.blocks, _say)]
        return engine.serve(requests, streams=streams, watchers=watchers)

    def _requests(self, prompts: list[Prompt], sampling: Sampling) -> list[TextRequest]:
        """Returns checked requests, with ids that no earlier call has used."""
        engine = self._running()
        if sampling is None:
            sampling = self.get_default_sampling_params()
        each: list[Any] = [*sampling] if isinstance(sampling, list | tuple) else [sampling] * len(prompts)
        for one in each:
            if not isinstance(one, AnySamplingParams):
                what = f"{'is' if one is sampling else 'has'} a {type(one).__name__}"
                raise RequestError(
                    f"sampling_params {what}; give SamplingParams(temperature=0.8, …), for all or for each"
                )
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts and {len(each)} sampling parameters; give one for all, or each")
        now_ns = engine.now_ns
        requests = []
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            request_id = str(self._num_requests + index)
            request = Request(
                request_id, prompt.token_ids, now_ns, sampling=self._completed(one, request_id),
                priority=prompt.priority, cache_salt=prompt.cache_salt,
            )  # fmt: skip
            requests.append(TextRequest(request, index, prompt.text))
            engine.check(requests[-1], self._vocab_size)
        self._num_requests += len(requests)
        return requests

    def _completed(self, sampling: AnySamplingParams, request_id: str) -> AnySamplingParams:
        """Adds a seed of its own if sampling is random, and the tokens that end the model's texts."""
        if needs_seed(sampling):
            sampling = replace(sampling, seed=request_seed(self._seed, request_id))
        if not sampling.ignore_eos and self._eos_ids:
            stops = dict.fromkeys((*sampling.stop_token_ids, *self._eos_ids))
            sampling = replace(sampling, stop_token_ids=tuple(stops))
        return sampling


def _say(line: str) -> None:
    tqdm.write(line, file=sys.stderr)
