"""Builds a trace, whole or streamed, from the `trace` group. Owns the order in which its settings are applied."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from experiments.configuration.config import TRACES, RunConfig
from experiments.configuration.settings import (
    AgenticTraceConfig,
    MooncakeTraceConfig,
    OwnTraceConfig,
    ShareGPTTraceConfig,
    SyntheticTraceConfig,
    TraceConfig,
)
from experiments.configuration.structured import freeze
from experiments.wiring.own_traces import make_trace
from testbed.core.request import Request
from testbed.core.sampling import SamplingParams
from testbed.errors import ConfigError
from testbed.foreign_text import unknown
from testbed.specs.hf_config import end_tokens
from testbed.traces import transforms
from testbed.traces.arrivals import ArrivalConfig
from testbed.traces.fingerprint import fingerprint
from testbed.traces.generator_config import SyntheticConfig
from testbed.traces.readers import MAX_WHOLE_ROWS, READERS, open_trace
from testbed.traces.readers.open_text import existing_file, watching
from testbed.traces.schema import Trace, TraceRequest, TraceSource
from testbed.traces.stream import CountedTrace, StreamedTrace, whole
from testbed.traces.synthesis import content_key

_OF_FOLDERS = ("servegen", "agentic")  # formats whose trace may be a folder


def check_trace(config: RunConfig) -> None:
    """Raises ConfigError or TraceError for errors in the `trace` group that are known without reading or generating."""
    settings = config.trace
    vocab_size(config)
    if config.is_simulated and config.recorded_run is None:
        check_simulated_output(settings.forced)
    if "_target_" in config.raw["trace"]:
        return
    if isinstance(settings, SyntheticTraceConfig):
        _generator(config)
        named = [(settings.lengths_from, settings.lengths_format)]
    else:
        named = [(_file(settings), settings.name)]
        if _draws_arrivals(settings):
            freeze(ArrivalConfig, "trace", config.raw["trace"])
    if isinstance(settings, ShareGPTTraceConfig) and settings.tokenizer and not Path(settings.tokenizer).exists():
        load_tokenizer(settings.tokenizer)  # a Hugging Face name: only its loader knows whether it is cached here
    named += [(step["path"], step.get("format")) for step in settings.transforms if step["name"] == "merge"]
    for path, form in named:
        if path is not None and not (form in _OF_FOLDERS and Path(path).is_dir()):
            existing_file(path)


def build_trace(config: RunConfig) -> Trace:
    """Reads or generates the whole trace, then applies the settings of the `trace` group."""
    with reading():
        return whole(_build(config, stream=False))


def build_source(config: RunConfig) -> TraceSource:
    """Like build_trace, but returns a streamed trace if `trace.stream` is true (null: if it is long) and possible."""
    with reading():
        return _build(config, config.trace.stream)


def describe_trace(trace: Trace | CountedTrace, speed: float = 1.0) -> dict[str, Any]:
    """Returns the manifest's entry for a trace. differ_in: the fields of ClassFields in which requests differ. For a
    streamed trace that was not read to its end, number of requests, fingerprint and these are None if not known.

    speed: of its replay, which `sent_fingerprint` has in the arrivals, as the trace of a simulation of it does."""
    read = trace if isinstance(trace, CountedTrace) else CountedTrace(trace)
    sent = None
    if isinstance(trace, Trace):
        deque(read, maxlen=0)
        sent = None if speed == 1 else fingerprint(transforms.speed_up(trace, speed))
    notes = [*trace.notes, *([] if read.batches.note is None else [read.batches.note])]
    return {
        "name": trace.name, "num_requests": trace.num_requests, "fingerprint": read.fingerprint,
        "differ_in": read.differ_in, "is_closed_loop": read.is_closed_loop, "notes": notes,
        "sent_fingerprint": sent or read.fingerprint,
    }  # fmt: skip


@contextmanager
def reading() -> Iterator[None]:
    """Context that shows the number of lines read from text files; silent if standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from tqdm import tqdm  # not at the top: only needed on a terminal

    with tqdm(desc="read", unit="line", leave=False, delay=0.5) as bar, watching(bar.update):
        yield


def _build(config: RunConfig, stream: bool | None) -> TraceSource:
    settings, values = config.trace, config.raw["trace"]
    seed = config.seed if settings.seed is None else settings.seed
    source: TraceSource
    if "_target_" in values:
        source = make_trace(values, seed)
    elif settings.name == "synthetic":
        source = _synthetic(config, seed, stream)
    else:
        path, options = _file(settings), _reader_options(settings, values)
        source = open_trace(settings.name, path, settings.limit, stream, seed, **options)
    source = _transformed(source, settings)
    return transforms.apply_all(
        source, settings.transforms, lambda name, path, seed: open_trace(name, path, seed=seed), seed
    )


def _file(settings: TraceConfig) -> str:
    """Returns the trace file to read. Raises ConfigError if none is given, or for an unknown format."""
    if settings.name not in READERS:
        raise ConfigError(unknown(f"trace is {settings.name!r}", settings.name, ["synthetic", *READERS]))
    if settings.path is None:
        raise ConfigError(f"trace={settings.name} needs trace.path=<file>")
    return settings.path


def _generator(config: RunConfig) -> SyntheticConfig:
    if config.trace.path is not None:
        raise ConfigError(
            f"trace.path is {config.trace.path!r}, and trace=synthetic reads no file; say what the file is, as "
            f"trace=azure (one of: {', '.join(READERS)})"
        )
    return freeze(SyntheticConfig, "trace", config.raw["trace"])


def _synthetic(config: RunConfig, seed: int, stream: bool | None) -> TraceSource:
    from testbed.traces.generators import generate, stream_generated  # not at the top: unused if a trace is read

    settings = config.trace
    assert isinstance(settings, SyntheticTraceConfig)
    generator = _generator(config)
    lengths_from = None
    if settings.lengths_from is not None:
        own_seed = content_key("lengths_from", seed) >> 1  # as trace.seed may be
        lengths_from = open_trace(settings.lengths_format, settings.lengths_from, seed=own_seed)
    if stream is None:
        stream = min(settings.limit or generator.num_requests, generator.num_requests) > MAX_WHOLE_ROWS
    made: Any = (stream_generated if stream else generate)(generator, seed, lengths_from)
    return made if settings.limit is None else cast(TraceSource, transforms.limit(made, settings.limit))


def _transformed(source: TraceSource, settings: TraceConfig) -> TraceSource:
    """Applies window, rate and lengths, in this order."""
    trace: Any = source if isinstance(source, Trace | StreamedTrace) else whole(source)
    with _of_group():
        made = _windowed_and_scaled(trace, settings)
    if made is trace or not isinstance(made, StreamedTrace):
        return made

    def rows() -> Iterator[TraceRequest]:
        with _of_group():
            yield from made

    return made.derived(rows, None, made.num_requests)


@contextmanager
def _of_group() -> Iterator[None]:
    """Context in which errors of a transformation name the key of the `trace` group, not the parameter."""
    try:
        yield
    except ConfigError as error:
        if str(error).startswith("trace."):
            raise
        key, rest = str(error).split(" ", 1)
        raise ConfigError(f"trace.{'rate_scale' if key == 'factor' else key} {rest}") from None


def _windowed_and_scaled(trace: Any, settings: TraceConfig) -> TraceSource:
    if settings.start_s or settings.end_s is not None:
        trace = transforms.window(trace, settings.start_s, settings.end_s)
    if settings.rate_scale != 1.0:
        trace = transforms.scale_rate(trace, settings.rate_scale)
    if settings.max_prompt_tokens is not None or settings.max_output_tokens is not None:
        trace = transforms.clip_lengths(trace, settings.max_prompt_tokens, settings.max_output_tokens)
    return cast(TraceSource, trace)


def _draws_arrivals(settings: TraceConfig) -> bool:
    """Whether the format has no arrivals, so that keys of the group say how they are drawn."""
    return ArrivalConfig in TRACES.get(settings.name, ())


def _reader_options(settings: TraceConfig, values: dict[str, Any]) -> dict[str, Any]:
    if isinstance(settings, MooncakeTraceConfig):
        return {"spread_batches": settings.spread_batches}
    if isinstance(settings, OwnTraceConfig):
        return {"columns": settings.columns, "where": settings.where}
    if isinstance(settings, ShareGPTTraceConfig):
        tokenizer = None if settings.tokenizer is None else load_tokenizer(settings.tokenizer)
        return {"tokenizer": tokenizer, "max_turns": settings.max_turns}
    if not _draws_arrivals(settings):
        return {}
    closed = {"closed_loop": settings.closed_loop} if isinstance(settings, AgenticTraceConfig) else {}
    return {"arrivals": freeze(ArrivalConfig, "trace", values), **closed}


@lru_cache(maxsize=1)
def load_tokenizer(path: str) -> Callable[[str], list[int]]:
    """Returns a local Hugging Face tokenizer as a function from text to token ids. Raises ConfigError."""
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except ImportError:
        raise ConfigError("trace.tokenizer needs transformers: pip install '.[real]' in the repository") from None
    except Exception as error:  # noqa: BLE001  (a damaged file raises anything, a bare Exception included)
        from huggingface_hub.constants import HF_HUB_CACHE

        said, cached = str(error).partition("\n")[0], Path(HF_HUB_CACHE, f"models--{path.replace('/', '--')}")
        if not (Path(path).exists() or cached.exists()):  # the loader would say that it cannot connect
            said = "no folder, and no Hugging Face name that is cached here"
        raise ConfigError(f"trace.tokenizer: no tokenizer at {path} ({said or type(error).__name__})") from None
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def vocab_size(config: RunConfig) -> int:
    """Returns the vocabulary size of synthetic tokens: trace.vocab_size, else the model's. Raises ConfigError if it
    exceeds the model's."""
    size = config.trace.vocab_size or config.model.vocab_size
    if size > config.model.vocab_size:
        raise ConfigError(
            f"trace.vocab_size is {size}, but model {config.model.name} has {config.model.vocab_size} tokens; lower it"
        )
    return size


# --- trace.forced: how a replay forces outputs ---


def end_token_ids(config: RunConfig) -> tuple[int, ...]:
    """Returns the tokens that end the outputs that the model ends, besides `sampling.stop_token_ids`: all of a
    checkpoint, of which the model's shape has only the first. A simulation has no such outputs."""
    return () if config.is_simulated or config.sampling.ignore_eos else end_tokens(config.model.path)


def with_ends(sampling: SamplingParams, ends: Iterable[int]) -> SamplingParams:
    return replace(sampling, stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ends))))


def forcing(request: Request, forced: str) -> Request:
    """Returns a trace's request for a mode of `trace.forced`; one without a recorded output is unchanged.

    tokens: the recorded tokens are fed back; beams choose their own, so of them only the lengths are forced. lengths:
    the model's own tokens are fed back, as many as were recorded; neither EOS nor a stop token ends the output.
    nothing: the model's own tokens, up to sampling.max_tokens.
    """
    output, sampling = request.forced_output, request.sampling
    if output is None or (forced == "tokens" and sampling.beam_width <= 1):
        return request
    if forced != "nothing":
        number = len(output)
        sampling = replace(sampling, max_tokens=number, min_tokens=0, ignore_eos=True, stop_token_ids=(), stop=())
    return request.replace(forced_output=None, sampling=sampling)


def check_simulated_output(forced: str) -> None:
    """Raises ConfigError if a simulation cannot know the length of outputs."""
    if forced == "nothing":
        raise ConfigError(
            "trace.forced=nothing lets the model end its outputs, and the simulator has no model; choose tokens or "
            "lengths (the same to a simulator), or backend=real"
        )
