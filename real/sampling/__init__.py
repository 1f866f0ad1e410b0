"""From logits to tokens: sampling, penalties and filters, log-probabilities. It knows rows and logits, but no model and
no KV cache."""
