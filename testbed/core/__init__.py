"""The state machine: requests, sequences, steps, plans, and the loop that serves them."""
