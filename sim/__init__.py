"""The simulator: drives the core with a SimPy clock and a cost model. Knows nothing of torch.

`driver` answers the loop's commands in SimPy time: `backend` prices a plan by a model of `cost/`, swaps wait for the
`link`, and `recorded_device` repeats a real run's tape. A `fleet` of `replica`s shares the clock with a router;
`front_end` is the API server before them.
"""

from testbed import compiled

compiled.decide()  # before any module of this package that may be compiled
