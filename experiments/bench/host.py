"""Host time of the engine's steps, by part, with a device that takes no time: no GPU is needed.

The model has no layers, and replaying a captured step does nothing. Everything else is the engine itself: the core's
plan, the inputs, the launches around the model, sampling over a vocabulary of 32, commit and records. The time of
launches on a GPU and of attention's preparation is not included. Records count as part of `schedule`; a run on a GPU
writes them while the next step runs. A second table counts torch's operators in sampling, and the bytes that they read
and write, at the vocabulary size of a real model. Compare numbers of one run only.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.bench.offline import AllAtOnce
from experiments.console import Parser
from experiments.wiring.build_engine import real_packages
from testbed.checks import require_whole
from testbed.core.outcome import Spans
from testbed.core.request import GREEDY, Request, SamplingParams
from testbed.specs.model import ModelSpec

if TYPE_CHECKING:
    from real.backend import RealBackend

BATCHES, CONTEXT = (1, 8, 64, 256), 1024
LONG = (64, 32_768)  # sequences, tokens of each
CHUNK = 512  # prompt tokens of a mixed step
SAMPLINGS = {
    "greedy": GREEDY,
    "random": SamplingParams(temperature=0.8),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k, top-p": SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
}
COUNTED = (64, 151_936)  # rows and vocabulary size of the sampling whose operators are counted
BLOCK_SIZE, VOCAB = 16, 32
WARM_UP_STEPS = 5
PARTS = ("schedule", "prepare", "launch", "sample", "outcomes")


class SteadyBatch(NamedTuple):
    """A batch that stays the same in every step. is_mixed: each step also computes a chunk of a long prompt."""

    batch: int
    context: int
    sampling: str  # a key of SAMPLINGS, or `replay`: greedy, with forced outputs
    is_mixed: bool = False

    @property
    def name(self) -> str:
        kind = f"mixed, {CHUNK} tokens beside" if self.is_mixed else "decode"
        return f"{kind}, batch {self.batch}, context {self.context:,}, {self.sampling}"


def main(arguments: list[str]) -> int:
    parser = Parser("testbed bench host", description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="that are measured of each batch; the median counts (60)")
    parser.add_argument("--filter", default="", help="only batches in whose name this is found")
    options = parser.parse_args(arguments)
    require_whole("--steps", options.steps, 1)
    with real_packages("this benchmark"):
        import torch
    torch.set_num_threads(1)
    print(f"host: µs a step, median of {options.steps}; schedule: commit, records and plan\n")
    print(f"  {'step':<62}" + "".join(f"{part:>10}" for part in (*PARTS, "all")), flush=True)
    for load in loads():
        if options.filter in load.name:
            times = measure(load, options.steps)
            print(f"  {load.name:<62}" + "".join(f"{ns / 1e3:>10.1f}" for ns in (*times, sum(times))), flush=True)
    num_rows, vocab_size = COUNTED
    print(f"\n  sampling of {num_rows} rows at a vocabulary of {vocab_size:,} by torch: operators, GB read and written")
    for name, sampling in SAMPLINGS.items():
        counted = count_sampling(sampling, num_rows, vocab_size)
        print(f"  {name:<62}{counted.num_operators:>10}{counted.num_bytes / 1e9:>10.2f}", flush=True)
    return 0


def loads() -> Iterator[SteadyBatch]:
    for sampling in ("replay", *SAMPLINGS):
        for batch in BATCHES:
            yield SteadyBatch(batch, CONTEXT, sampling)
    yield SteadyBatch(*LONG, "greedy")
    for batch in BATCHES:
        yield SteadyBatch(batch, CONTEXT, "greedy", is_mixed=True)


# --- host time ---


def measure(load: SteadyBatch, num_steps: int) -> list[float]:
    """Returns the median ns of each of PARTS over the steps in which the whole batch decodes."""
    from experiments.configuration.compose import compose_config
    from experiments.wiring import build
    from real.clocks import SkippingClock
    from real.driver import Drive
    from testbed.core.serve import serve
    from testbed.records.recorder import RunRecorder

    num_wanted = WARM_UP_STEPS + num_steps
    num_tokens = load.context + num_wanted + load.batch * load.context // CHUNK
    budget = load.batch + CHUNK if load.is_mixed else load.batch * (load.context + 1)
    prompts = [[i % VOCAB] * load.context for i in range(load.batch)]
    if load.is_mixed:
        prompts.append([0] * (CHUNK * (num_wanted + 2)))
    longest = max(num_tokens, *(len(prompt) for prompt in prompts)) + 1
    num_blocks = sum(-(-(len(prompt) + num_tokens) // BLOCK_SIZE) for prompt in prompts)
    backend = _engine(longest, num_blocks, load.batch + 1, budget)
    overrides = [
        "scheduler=vllm_v1", "cache.prefix_caching=false", f"scheduler.max_num_batched_tokens={budget}",
        f"scheduler.max_num_seqs={load.batch + 1}", f"scheduler.max_model_len={longest}",
        f"model.max_position_embeddings={longest}",
    ]  # fmt: skip
    scheduler = build.build_scheduler(compose_config(overrides), build.Pools(num_blocks, 0))
    log = _Log(load)
    forced = [1] * num_tokens if load.sampling == "replay" else None
    params = replace(SAMPLINGS.get(load.sampling, GREEDY), max_tokens=num_tokens, ignore_eos=True)
    requests = [Request(str(i), p, sampling=params, forced_output=forced) for i, p in enumerate(prompts)]
    with tempfile.TemporaryDirectory() as folder:
        recorder = RunRecorder(Path(folder))
        drive = Drive(serve(AllAtOnce(requests), scheduler, recorder), _Watched(backend, log), SkippingClock(), log)
        while len(log.steps) < num_wanted:
            drive.step()
        recorder.close()
    return [statistics.median(column) for column in zip(*log.steps[WARM_UP_STEPS:], strict=True)]


def _engine(max_model_len: int, num_blocks: int, max_num_seqs: int, budget: int) -> RealBackend:
    """Builds the engine with a model that does nothing and with captured steps."""
    import torch

    from real.backend import RealBackend
    from real.config import EngineOptions, RealConfig
    from real.graphs import captured_shapes
    from real.max_load import capture_steps
    from real.models.interface import CausalLM

    spec = ModelSpec(
        name="nothing", hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, vocab_size=VOCAB, max_position_embeddings=max_model_len, dtype="float32",
    )  # fmt: skip

    class Nothing(CausalLM):
        def hidden_states(self, token_ids: Any, positions: Any, kv_caches: Any, attention: Any) -> Any:
            return hidden[: len(token_ids)]

        def logits(self, hidden: Any) -> Any:
            return logits[: len(hidden)]

    class NoAttention:
        name, supports_graphs = "nothing", True

        def prepare(self, metadata: Any) -> Any:
            return None

    backend = RealBackend(
        spec, RealConfig(device="cpu", attention="torch", load_format="dummy"),
        EngineOptions(BLOCK_SIZE, budget, max_num_seqs, max_model_len, num_gpu_blocks=num_blocks),
    )  # fmt: skip
    hidden = torch.zeros(budget, 8)
    logits = torch.randn(max_num_seqs, VOCAB, generator=torch.Generator().manual_seed(0))
    backend.runner.model, backend.runner.attention = Nothing(torch.nn.Identity(), torch.nn.Identity()), NoAttention()
    shapes = captured_shapes(max_num_seqs, min(budget, RealConfig().max_captured_tokens), max_num_seqs)

    def capture(work: Any) -> Any:
        result = work()
        return lambda: result

    backend.runner.graphs = capture_steps(backend.runner, backend.cache, shapes, capture)
    return backend


class _Watched:
    """The engine; gives the log the batch shape of each step."""

    def __init__(self, backend: RealBackend, log: _Log) -> None:
        self._backend, self._log = backend, log

    def start(self, plan: Any) -> Any:
        self._log.shape = plan.shape
        return self._backend.start(plan)


@dataclass
class _Log:
    """Keeps the times, by part, of the steps in which the whole batch decodes."""

    load: SteadyBatch
    shape: Any = None
    steps: list[tuple[float, ...]] = field(default_factory=list)

    def stepped(self, launch_ns: int, length_ns: int, spans: Spans) -> None:
        is_whole = self.shape.num_decodes == self.load.batch
        if is_whole and self.shape.num_prefill_tokens == (CHUNK if self.load.is_mixed else 0):
            parts = (spans.schedule_ns, spans.prepare_ns, spans.forward_ns, spans.sample_ns)
            self.steps.append((*parts, length_ns - sum(parts)))


# --- operators ---


class Counted(NamedTuple):
    num_operators: int  # that compute or copy; views are not counted
    num_bytes: int  # read and written by them


def count_sampling(sampling: SamplingParams, num_rows: int, vocab_size: int) -> Counted:
    """Counts the sampling operators of one decode step whose `num_rows` rows use the same sampling parameters."""
    import torch

    from real.sampling.inputs import Source, sample_inputs
    from real.sampling.sampler import launch
    from testbed.core.plan import ScheduledSequence

    rows = [
        ScheduledSequence(i, 7, 1, (0,), True, False, (0,), sampling, group_id=i, num_prompt_tokens=4)
        for i in range(num_rows)
    ]
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))
    inputs = sample_inputs(rows, Source(vocab_size))
    with torch.inference_mode(), counting() as counts:
        launch(logits, inputs, lambda places: logits)
    return Counted(len(counts), sum(counts))


@contextmanager
def counting() -> Iterator[list[int]]:
    """Within the context, appends the bytes read and written by each operator that torch launches."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    counts: list[int] = []

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            places = {tensor.untyped_storage().data_ptr() for tensor in read}
            is_write = [one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments]
            written = [one for one, is_one in zip(args, is_write, strict=False) if is_one and isinstance(one, Tensor)]
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            fresh = [one for one in made if one.untyped_storage().data_ptr() not in places]
            if (fresh or written) and "empty" not in func._schema.name:
                counts.append(sum(one.numel() * one.itemsize for one in (*read, *written, *fresh)))
            return result

    with Counting():  # type: ignore[no-untyped-call]  # as above
        yield counts
