"""The real engine: runs the core's plans with a model on CUDA or on the CPU. It knows nothing of the simulator.

`from experiments import LLM` generates text; the classes of its parameters and outputs are exported here. Importing
`real` does not load torch.

`driver` answers the loop's commands in real time (`clocks`). `backend.RealBackend` is one engine: `runner` turns a plan
into tensors (`batch`, `block_tables`, `staging`) and runs a model of `models/` over the KV of `cache_engine`, by replay
of `graphs` where the step's shape was captured; `sampling/` draws the tokens. `loader` reads weights, `max_load` finds
how many KV blocks fit. `fleet` and `parallel/` run several engines and ranks, `profiler/` measures steps for a fit,
`text/` generates text, and `vllm/` is this testbed inside vLLM.
"""

from __future__ import annotations

import os

from real.text.outputs import CompletionOutput, Piece, RequestOutput
from real.text.sampling import SamplingParams

__all__ = ["CompletionOutput", "Piece", "RequestOutput", "SamplingParams"]

# Set here because it is read only once, when torch loads its OpenMP runtime. Threads that wait for each other sleep
# instead of spinning: with other processes on the same cores, spinning made a 2,048-token prefill on 2 threads 7 times
# slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Triton 3.9 warns at each first launch if this is unset, and 3.10 no longer fuses by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
