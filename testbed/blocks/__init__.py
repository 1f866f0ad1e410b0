"""Paged KV blocks: pool, prefix cache, eviction, block tables. Knows tokens, but neither requests nor time."""
