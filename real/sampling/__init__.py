"""From logits to tokens: sampling, penalties and filters, log-probabilities. It knows rows and logits, but no model and
no KV cache.

`inputs` makes tensors of a plan's rows, `feed` sends them. `sampler` launches the step's draws and makes its outcomes:
`shaping` changes logits, `noise` hashes the randomness of a row, and `real.kernels.race` draws on a GPU. `beams`
chooses the continuations of a beam search.
"""
