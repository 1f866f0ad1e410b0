"""The real engine: drives the core with a model on CUDA or on the CPU. Knows nothing of the simulator."""

import os

# Read once, when torch loads its OpenMP runtime, hence here. Threads that wait for each other sleep instead of
# spinning: where other processes want the same cores, spinning made a 2,048-token prefill on 2 threads 7 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
