"""`testbed fidelity`: measured runs simulated again, request by request, and how far the simulator is off."""
