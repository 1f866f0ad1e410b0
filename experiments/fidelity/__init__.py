"""`testbed fidelity`: simulates measured runs again, request by request, and reports the simulator's errors."""
