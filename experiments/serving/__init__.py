"""This testbed's scheduler inside a user's vLLM server, and the run folder that it writes."""
