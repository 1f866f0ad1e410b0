"""Triton kernels over paged KV memory: store, decode, prefill, block copies. See docs/attention.md.

Public functions take torch tensors and hide the launches. They import without a GPU and without a driver; with
TRITON_INTERPRET=1 in the environment before the import they run on the CPU, slowly, for tests.
"""
