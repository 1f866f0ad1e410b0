"""Tensor parallelism, with one process per rank, to which the driver sends the plans; and processes of replicas."""
