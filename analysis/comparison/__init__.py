"""Comparison of several runs: which of them are the arms (variants) of one study, and how these differ.

`groups` and `arms` find out what was varied and which runs are replicates. `compare` and `effects` compute differences
with their intervals, `triggered` finds varied settings that had no effect, and `wording` writes a difference in a few
words. `fidelity` compares simulated with real runs. Sentences and pages belong to `analysis.reports`.
"""
