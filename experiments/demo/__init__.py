"""`make demo`: an ablation in the simulator, replays on the real engine, and one report."""
