"""Tensor parallelism, with one process per rank, to which the driver sends the plans; and processes of replicas.

The driver uses `backend` like an engine of one device. `group` is what layers see (sum, gather), `distributed` makes it
of NCCL or Gloo. `processes` starts and watches ranks and replicas, `wire` packs plans for them, `worker` is what runs
there, and `replica` is the proxy of an engine in another process.
"""
