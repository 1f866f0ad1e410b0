"""An engine on a GPU that is not there, which is watched for waits, and its twin on the CPU."""

from __future__ import annotations

from typing import Any

from real.backend import RealBackend
from testbed.core.plan import BatchPlan
from tests.real.engine_helpers import plan_of, tiny_backend
from tests.real.fake_cuda import FakeGPU

SHORT = {"max_num_seqs": 4, "max_model_len": 64}


class Watched:
    """An engine whose steps wait for the device as often as they must: once, and once more for swaps by themselves."""

    def __init__(self, gpu: FakeGPU, backend: RealBackend) -> None:
        self.gpu, self.backend = gpu, backend
        self.num_steps = 0

    def start(self, plan: BatchPlan) -> Any:
        """Implements testbed.core.interfaces.Backend."""
        before = len(self.gpu.syncs)
        work = self.backend.start(plan)
        assert self.gpu.syncs[before:] == [], "launching a step waits for nothing"
        wait = work.wait

        def waited() -> Any:
            before = len(self.gpu.syncs)
            result = wait()
            num = 2 if (plan.swap_out or plan.swap_in) and not plan.copies else 1
            assert self.gpu.syncs[before:] == ["an event"] * num
            return result

        self.num_steps += 1
        return work._replace(wait=waited)

    def step(self, *rows: Any, **moves: Any) -> Any:
        return self.start(plan_of(*rows, **moves)).wait()[0]


def on_gpu(gpu: FakeGPU, spec: Any = None, **options: Any) -> Watched:
    return Watched(gpu, tiny_backend(spec, device="cuda", **{**SHORT, **options}))


def on_cpu(spec: Any = None, **options: Any) -> RealBackend:
    return tiny_backend(spec, **{**SHORT, "attention": "torch", **options})


def num_replays(gpu: FakeGPU) -> int:
    return sum(graph.num_replays for graph in gpu.graphs)
