"""Attention over paged KV: what a step tells it, the providers that compute it, and how one is chosen."""
