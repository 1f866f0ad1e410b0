"""Text generation with the engine: LLM, tokenizer, incremental detokenisation, stop strings, live requests, outputs,
files of prompts, and the output of `testbed generate`.

Scheduler and backend are passed in; this package does not know how they are built. Nothing here imports torch.
"""
