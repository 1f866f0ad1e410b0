"""This testbed's scheduler inside a vLLM of one's own, and the run folder that it leaves."""
