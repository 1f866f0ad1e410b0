"""The real engine: drives the core with a model on CUDA or on the CPU. Knows nothing of the simulator.

`from real import LLM, SamplingParams` is the door for who wants text. An LLM is configured as any run is, and wired
where everything is (experiments/build.py), so the name leads to experiments/llm.py: the one import from this package to
that one, made when the name is asked for. Importing `real` loads no torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.llm import LLM
    from real.text.outputs import CompletionOutput, Piece, RequestOutput
    from real.text.sampling import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Piece", "RequestOutput", "SamplingParams"]

# Read once, when torch loads its OpenMP runtime, hence here. Threads that wait for each other sleep instead of
# spinning: where other processes want the same cores, spinning made a 2,048-token prefill on 2 threads 7 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from experiments.llm import LLM

        return LLM
    if name == "SamplingParams":
        from real.text.sampling import SamplingParams

        return SamplingParams
    if name in __all__:
        from real.text import outputs

        return getattr(outputs, name)
    raise AttributeError(f"module 'real' has no attribute {name!r}")
