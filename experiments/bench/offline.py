"""Whole runs of this engine and of others on the same checkpoint: prompts in, the requested number of tokens out.

Each contender has its own process, so that they share no threads, memory or settings; only one works at a time. On a
CPU they take turns; on a GPU only one is started at a time. The model is loaded, and one unmeasured run is finished,
before anything is timed.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from real.config import ATTENTION_NAMES
from real.replay import HostTimes
from testbed.core.commands import Arrive, Event
from testbed.core.outcome import Finished
from testbed.core.request import Request, SamplingParams
from testbed.errors import ConfigError, TestbedError
from testbed.specs.model import ModelSpec

CPU_DTYPES = ("float32", "bfloat16")
VLLM_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
SERVED, SERVED_TOKENS = 64, 128  # requests, and output tokens of each, in the GPU run that measures the host's share


class OfflineLoad(NamedTuple):
    """Requests that all arrive at once. lengths: output tokens of each."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]

    @property
    def is_even(self) -> bool:
        """Whether all prompts have one length and all outputs have one length: a single batch needs no padding."""
        return len({*map(len, self.prompts)}) == len({*self.lengths}) == 1


def cpu_loads(vocab_size: int) -> list[OfflineLoad]:
    draw = random.Random(0)
    even = OfflineLoad("16 x (128 in + 128 out)", _prompts(draw, vocab_size, [128] * 16), [128] * 16)
    sizes = [draw.randint(16, 256) for _ in range(64)]
    mixed = OfflineLoad(
        "64 mixed, 16 to 256 in and out", _prompts(draw, vocab_size, sizes), [draw.randint(16, 256) for _ in sizes]
    )
    return [even, mixed]


def _prompts(draw: random.Random, vocab_size: int, sizes: list[int]) -> list[list[int]]:
    return [[draw.randrange(vocab_size) for _ in range(size)] for size in sizes]


# --- contenders ---


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all contenders share. device: cpu or cuda. threads: on the CPU; None: the engine's default."""

    path: Path
    dtype: str
    device: str
    threads: int | None
    max_new_tokens: int


class Generate:
    """transformers.generate: one static batch from the first token to the last."""

    def __init__(self, setting: Setting) -> None:
        self._model = _model_of(setting)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        import torch

        inputs = torch.tensor(prompts, device=self._model.device)
        with torch.inference_mode():
            output = self._model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=lengths[0], min_new_tokens=lengths[0],
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        tokens: list[list[int]] = output[:, inputs.shape[1] :].tolist()
        return tokens


class ContinuousBatching:
    """transformers' own scheduler and paged KV cache, kept between runs."""

    def __init__(self, setting: Setting) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        # drop only its log lines that ask for psutil: errors are logged there, too
        logging.getLogger("ContinuousBatchingLogger").addFilter(lambda record: "psutil" not in record.getMessage())
        # by default its cache takes most of a CPU machine's memory; 256 blocks hold every request of these loads
        room = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=2048) if setting.device == "cpu" else None
        config: Any = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=setting.max_new_tokens)
        model = _model_of(setting)
        self._context = model.continuous_batching_context_manager(  # kept, as it stops when it is deleted
            generation_config=config, continuous_batching_config=room
        )
        self._manager: Any = self._context.__enter__()

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """Generates with a token limit for each request. Raises TestbedError if a request fails."""
        manager, outputs = self._manager, dict[str, list[int]]()
        ids: list[str] = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
        while len(outputs) < len(ids):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise TestbedError("it stopped before it was done; see its log")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise TestbedError(str(result.error))
                outputs[result.request_id] = result.generated_tokens
        return [outputs[i] for i in ids]


class Vllm:
    """vLLM in this process with its own scheduler; on a CPU with enforce_eager, that is without torch.compile."""

    def __init__(self, setting: Setting) -> None:
        os.environ |= VLLM_VARIABLES
        from vllm import LLM

        self._llm: Any = LLM(
            str(setting.path), dtype=setting.dtype, skip_tokenizer_init=True, enable_prefix_caching=False,
            enforce_eager=setting.device == "cpu", max_num_seqs=256, max_model_len=2048 + setting.max_new_tokens,
            disable_log_stats=True,
        )  # fmt: skip

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        import vllm

        sampling = [
            vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths
        ]
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Ours:
    """This testbed's engine and core, with a new scheduler for each run. Token ids in and out: no text, no records."""

    def __init__(self, setting: Setting, attention: str = "auto") -> None:
        from experiments.configuration.compose import compose_config
        from experiments.wiring.build_engine import build_real_backend

        options = [f"backend.num_threads={setting.threads}"] if setting.threads else []
        self._config = compose_config(
            ["backend=real", "scheduler=vllm_v1", "cache.prefix_caching=false", f"model.path={setting.path}",
             f"backend.dtype={setting.dtype}", f"backend.device={setting.device}", f"backend.attention={attention}",
             "scheduler.max_num_seqs=256", *options]
        )  # fmt: skip
        self._backend = build_real_backend(self._config)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        from experiments.wiring.build import Pools, build_scheduler
        from real.clocks import RealTimeClock
        from real.driver import run
        from testbed.core.commands import Recorder
        from testbed.core.serve import serve

        scheduler = build_scheduler(self._config, Pools(self._backend.num_gpu_blocks, self._backend.num_cpu_blocks))
        sampling = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
        asked = zip(prompts, sampling, strict=True)
        inbox = AllAtOnce([Request(str(i), prompt, sampling=params) for i, (prompt, params) in enumerate(asked)])
        host = HostTimes()
        run(serve(inbox, scheduler, Recorder()), self._backend, RealTimeClock(), log=host)
        self.host_share = host.describe()["exposed_share"]
        return [inbox.outputs[str(i)] for i in range(len(prompts))]


OURS, STATIC = "this engine", "transformers.generate"
PROVIDERS = tuple(name for name in ATTENTION_NAMES if name not in ("auto", "cpu"))  # on a GPU
ARMS: dict[str, Callable[[Setting], Any]] = {  # engines that generate greedily
    STATIC: Generate,
    "transformers, continuous batching": ContinuousBatching,
    "vLLM": Vllm,
    OURS: Ours,
    **{f"{OURS}, {name}": partial(Ours, attention=name) for name in PROVIDERS},
}
CPU_ARMS = (STATIC, "transformers, continuous batching", "vLLM", OURS)
# GPU time is scarce: our fast providers come first, torch's attention, by far the slowest, last
GPU_ARMS = (*(f"{OURS}, {name}" for name in PROVIDERS[:-1]), *CPU_ARMS[1:3][::-1], f"{OURS}, {PROVIDERS[-1]}")


def _model_of(setting: Setting) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(setting.path, dtype=getattr(torch, setting.dtype))  # in eval mode
    return model.to(setting.device)


class AllAtOnce:
    """An inbox whose requests all arrive at the start. outputs: output tokens of finished requests, by request id."""

    is_open = False

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self.outputs: dict[str, list[int]] = {}

    def next_ns(self) -> int | None:
        return 0 if self._requests else None

    def due(self, now_ns: int) -> list[Event]:
        due: list[Event] = [Arrive(request) for request in self._requests]
        self._requests = []
        return due

    def finished(self, requests: list[Finished], now_ns: int) -> None:
        for finished in requests:
            self.outputs[finished.request.request_id] = list(finished.output_token_ids)


# --- their processes ---


class Contender:
    """One of ARMS in a process of its own. Raises TestbedError, in one line, if it cannot run on this machine."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        self._process = ProcessPoolExecutor(1, get_context("spawn"))
        before = dict(os.environ)
        if setting.threads is not None:  # the OpenMP limit, whichever library uses it
            os.environ["OMP_NUM_THREADS"] = str(setting.threads)
        try:
            self._ask(_make, name, setting)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def generate(self, load: OfflineLoad) -> tuple[float, list[list[int]], float | None]:
        """Returns the seconds taken, the outputs, and for this engine the host's share of a step (else None)."""
        taken_s, outputs, host_share = self._ask(_generate, load.prompts, load.lengths)
        if [len(tokens) for tokens in outputs] != load.lengths:
            raise TestbedError(f"{self.name} did not give every request the tokens that it asked for")
        return taken_s, outputs, host_share

    def close(self) -> None:
        with suppress(RuntimeError):  # the process may have ended already
            self._process.submit(os._exit, 0)  # without the clean-up of libraries
        self._process.shutdown(wait=False)

    def _ask(self, work: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._process.submit(work, *arguments).result()
        except BrokenProcessPool:
            raise TestbedError(f"{self.name}: its process has died") from None
        except Exception as error:  # noqa: BLE001  a contender may raise anything
            self.close()
            if isinstance(error, ModuleNotFoundError):
                raise TestbedError(f"{self.name}: the package {error.name!r} is not here") from None
            raise TestbedError(f"{self.name}: {' '.join(str(error).split())[:200] or type(error).__name__}") from None


_arm: Any = None  # the engine; set only in a contender's process


def _make(name: str, setting: Setting) -> None:
    global _arm
    if setting.threads is not None:
        import torch

        torch.set_num_threads(setting.threads)
    _arm = ARMS[name](setting)


def _generate(prompts: list[list[int]], lengths: list[int]) -> tuple[float, list[list[int]], float | None]:
    began = time.perf_counter()
    outputs = _arm.generate(prompts, lengths)
    return time.perf_counter() - began, outputs, getattr(_arm, "host_share", None)


# --- comparing ---


def on_cpu(spec: ModelSpec, repeats: int, threads: int, dtypes: Sequence[str]) -> None:
    """Runs both loads in each dtype, all contenders in turns."""
    for dtype in dtypes:
        with _checkpoint(replace(spec, dtype=dtype)) as path:
            loads = cpu_loads(spec.vocab_size)
            setting = Setting(path, dtype, "cpu", threads, max(max(load.lengths) for load in loads))
            contenders = _started(CPU_ARMS, setting)
            for load in loads:
                size = f"{spec.num_parameters / 1e6:.1f} M parameters, {dtype}, {threads} threads"
                print(f"\n  {size}, {load.name}, in turns", flush=True)
                able = [one for one in contenders if load.is_even or one.name != STATIC]
                _compare(able, load, repeats)
            for one in contenders:
                one.close()


def on_gpu(spec: ModelSpec, repeats: int) -> None:
    """Runs the load of nano-vllm's benchmark, one contender after the other."""
    draw = random.Random(0)
    prompts = _prompts(draw, spec.vocab_size, [draw.randint(100, 1024) for _ in range(256)])
    load = OfflineLoad("256 requests, 100 to 1,024 in and out", prompts, [draw.randint(100, 1024) for _ in prompts])
    print(f"\n  {spec.name}, {spec.dtype}, {load.name}: {sum(load.lengths):,} tokens", flush=True)
    served = OfflineLoad("", load.prompts[:SERVED], [SERVED_TOKENS] * SERVED)
    with _checkpoint(spec) as path:
        first: dict[str, list[float]] = {}  # rates of the first contender that ran; the others are shown relative to it
        for name in GPU_ARMS:
            for one in _started([name], Setting(path, spec.dtype, "cuda", None, max(load.lengths))):
                rates = _rates([one], load, repeats)[0]
                if name in rates:
                    first = first or rates
                    _show(rates, first)
                    _, _, host_share = _rates([one], served, 0)
                    if host_share is not None:
                        print(f"  {name}, {SERVED} at a time: the host takes {host_share:.1%} of a step", flush=True)
                one.close()


@contextmanager
def _checkpoint(spec: ModelSpec) -> Iterator[Path]:
    from real.checkpoint import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        yield make_checkpoint(Path(folder) / "model", spec, seed=1)


def _started(names: Sequence[str], setting: Setting) -> list[Contender]:
    """Starts the contenders that can run on this machine; prints for each other one why it cannot."""
    found = []
    for name in names:
        try:
            found.append(Contender(name, setting))
        except TestbedError as error:
            print(f"  left out: {error}", flush=True)
    return found


def _compare(contenders: list[Contender], load: OfflineLoad, repeats: int) -> None:
    rates, outputs, host_share = _rates(contenders, load, repeats)
    if OURS not in rates:
        raise ConfigError("this engine did not run; there is nothing to compare")
    _show(rates, rates)
    if host_share is not None:
        print(f"  {OURS}: the host takes {host_share:.1%} of a step")
    for name, theirs in outputs.items():
        same = sum(one == two for one, two in zip(outputs[OURS], theirs, strict=True))
        if name != OURS:
            print(f"  {same} of {len(theirs)} outputs are those of {name}, token for token")


def _rates(
    contenders: list[Contender], load: OfflineLoad, repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]], float | None]:
    """Returns tokens/s of each contender in each turn, then the outputs and our host share of the unmeasured first."""
    working = {one.name: one for one in contenders}
    rates: dict[str, list[float]] = {name: [] for name in working}
    first: dict[str, list[list[int]]] = {}
    shares: list[float] = []
    for turn in range(1 + repeats):
        for name, one in list(working.items()):
            try:
                took_s, outputs, share = one.generate(load)
            except TestbedError as error:
                print(f"  left out: {error}", flush=True)
                del working[name]
                continue
            if turn:
                rates[name].append(sum(load.lengths) / took_s)
            else:
                first[name] = outputs
                shares += [] if share is None else [share]
    left = {name: rates[name] for name in working}
    return left, {name: first[name] for name in working}, shares[0] if shares else None


def _show(rates: dict[str, list[float]], beside: dict[str, list[float]]) -> None:
    """Prints each contender's median and range, and the ratio of its median to that of the first of `beside`."""
    first = statistics.median(next(iter(beside.values()), [1.0]))
    for name, found in rates.items():
        spread, median = f"({min(found):,.0f} to {max(found):,.0f})", statistics.median(found)
        print(f"  {name:<36}{median:>9,.0f} tokens/s {spread:<20}{median / first:>6.2f}x", flush=True)
