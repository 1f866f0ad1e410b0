"""Attention over paged KV: the metadata of a step, the providers that compute attention, and the choice of one."""
