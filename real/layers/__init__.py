"""The layers that models are made of. They know tensors and weights; no requests, no scheduling."""
