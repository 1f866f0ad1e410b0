"""The real engine: drives the core with a model on CUDA or on the CPU. Knows nothing of the simulator.

`from experiments import LLM` makes one that generates text; how it is sampled and what comes out is named here.
Importing `real` loads no torch.
"""

from __future__ import annotations

import os

from real.text.outputs import CompletionOutput, Piece, RequestOutput
from real.text.sampling import SamplingParams

__all__ = ["CompletionOutput", "Piece", "RequestOutput", "SamplingParams"]

# Read once, when torch loads its OpenMP runtime, hence here. Threads that wait for each other sleep instead of
# spinning: where other processes want the same cores, spinning made a 2,048-token prefill on 2 threads 7 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
