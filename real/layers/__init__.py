"""The layers that models consist of. They know tensors and weights, but no requests and no scheduling."""
