"""The simulator: drives the core with a SimPy clock and a cost model. Knows nothing of torch."""
