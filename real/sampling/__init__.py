"""From logits to tokens: draws, what shapes them, log-probabilities. Knows rows and logits; no model, no KV cache."""
