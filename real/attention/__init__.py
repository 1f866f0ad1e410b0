"""Attention over paged KV: the metadata of a step, the providers that compute attention, and the choice of one.

`interface` is what models and runner see: a provider prepares a step, then computes each layer. `registry` takes the
first provider that can run, after `first_step` has tried it. `flash3_provider`, `flash_provider` and
`varlen_provider` call libraries, `triton_provider` our kernels, `cpu_provider` C; `torch_provider` is the reference.
"""
