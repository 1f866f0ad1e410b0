"""Paged KV blocks: pool, prefix cache, eviction, block tables. Knows tokens, not the meaning of requests, nor time."""
