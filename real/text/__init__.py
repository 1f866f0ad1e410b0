"""Text around the engine: tokenizer, incremental detokenisation, stop strings, live requests, outputs, status line.

Everything here takes a scheduler and a backend by argument; who builds them is not known. Nothing here imports torch.
"""
