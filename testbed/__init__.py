"""The core: one scheduler and paged-KV block manager, a pure state machine (no clock, device, randomness or I/O)."""

from testbed import compiled

compiled.decide()  # before any module that may be compiled
