"""The simulator: drives the core with a SimPy clock and a cost model. Knows nothing of torch."""

from testbed import compiled

compiled.decide()  # before any module of this package that may be compiled
