"""Against vLLM itself: `make test-vllm`, in an environment of its own. Everywhere else these are skipped."""
