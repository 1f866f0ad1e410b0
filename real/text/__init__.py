"""Text around the engine: LLM, tokenizer, incremental detokenisation, stop strings, live requests, outputs, files of
prompts, what `testbed generate` prints.

Everything here takes a scheduler and a backend by argument; who builds them is not known. Nothing here imports torch.
"""
