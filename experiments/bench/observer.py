"""`testbed bench observer`: the time that the observer adds to each vLLM step; needs vLLM installed (docs/vllm.md).

vLLM runs in this process on a random model, with its own synchronous scheduler under the observer. In every step in
which all requests decode, the observer's `schedule` and `update_from_output` are timed. The time of vLLM's own methods,
which they call, is subtracted.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from experiments.bench.offline import VLLM_VARIABLES
from experiments.bench.vllm import MODEL
from experiments.console import Parser
from testbed.checks import require_whole
from testbed.errors import ConfigError

STEP_METHODS = ("schedule", "update_from_output")
PROMPT_TOKENS = 16
MAX_NUM_STEPS = 2000  # the model's maximum length is about twice this


def main(arguments: Sequence[str]) -> int:
    parser = Parser("testbed bench observer", description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[4, 16, 25], help="requests that decode (4 16 25)")
    parser.add_argument("--steps", type=int, default=150, help="that count, of each of them (150)")
    options = parser.parse_args(arguments)
    require_whole("--running", min(options.running), 1)
    require_whole("--steps", options.steps, 1)
    if options.steps > MAX_NUM_STEPS:
        raise ConfigError(f"--steps is {options.steps}; the model has room for {MAX_NUM_STEPS}")
    os.environ.update(VLLM_VARIABLES | os.environ)
    with tempfile.TemporaryDirectory() as scratch:
        steps = _Steps(Path(scratch), max(options.running))
        print(
            "| requests that decode | vLLM's plan and commit, us | the observer's part, us (its lowest … highest 5 %) |"
        )
        print("|---|---|---|")
        for num_running in options.running:
            own, added = steps.of(num_running, options.steps)
            low, *_, high = statistics.quantiles(added, n=20) if len(added) > 1 else added * 2
            print(
                f"| {num_running} | {statistics.median(own) / 1e3:.0f} | {statistics.median(added) / 1e3:.0f} "
                f"({low / 1e3:.0f} … {high / 1e3:.0f}) |", flush=True,
            )  # fmt: skip
    return 0


class _Steps:
    """vLLM under the observer, with timers around the methods of both schedulers."""

    def __init__(self, folder: Path, max_running: int) -> None:
        (folder / "config.json").write_text(json.dumps(MODEL))
        try:
            from vllm import LLM
        except ImportError:
            raise ConfigError("testbed bench observer runs in vLLM's environment: docs/vllm.md") from None
        from vllm.v1.core.sched.scheduler import Scheduler

        from real.vllm.observer import ObservedScheduler

        self._took_ns: Counter[str] = Counter()  # by class; the observer's time includes vLLM's methods that it calls
        for owner, method in product((Scheduler, ObservedScheduler), STEP_METHODS):
            _adding(self._took_ns, owner, method)
        llm = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, block_size=32,
            max_num_seqs=max_running, max_num_batched_tokens=max(8192, PROMPT_TOKENS * max_running),
            async_scheduling=False, scheduler_cls=ObservedScheduler,
            additional_config={"testbed": {"observe": str(folder / "log.jsonl")}},
        )  # fmt: skip
        self._engine = llm.llm_engine

    def of(self, num_running: int, num_steps: int) -> tuple[list[int], list[int]]:
        """Returns ns of each step: in vLLM's own plan and commit, and added by the observer."""
        from vllm import SamplingParams

        for index in range(num_running):
            params = SamplingParams(temperature=0.0, max_tokens=num_steps + 2, ignore_eos=True, detokenize=False)
            self._engine.add_request(
                f"{num_running}-{index}", {"prompt_token_ids": [index % 1000 + 3] * PROMPT_TOKENS}, params
            )
        self._engine.step()  # their prompts
        own, added = [], []
        for _ in range(num_steps):
            self._took_ns.clear()
            self._engine.step()
            own.append(self._took_ns["Scheduler"])
            added.append(self._took_ns["ObservedScheduler"] - self._took_ns["Scheduler"])
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return own, added


def _adding(took_ns: Counter[str], owner: type, method: str) -> None:
    """Patches a method of `owner` so that its duration is added to `took_ns` under the class's name."""
    own = getattr(owner, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        began_ns = time.perf_counter_ns()
        result = own(*args, **kwargs)
        took_ns[owner.__name__] += time.perf_counter_ns() - began_ns
        return result

    setattr(owner, method, timed)
