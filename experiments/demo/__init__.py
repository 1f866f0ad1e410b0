"""`make demo`: an ablation in the simulator (`command`), its trace on the real engine (`real_half`), one report."""
