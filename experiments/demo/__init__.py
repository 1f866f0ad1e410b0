"""`make demo`: an ablation in the simulator, its trace on the real engine, one report."""
