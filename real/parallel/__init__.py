"""Tensor parallelism: one process per rank, the driver sends the plan."""
