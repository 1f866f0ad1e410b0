"""Several runs: which of them are arms of one study, and what may be said of their differences.

`groups` and `arms` say what was varied and what replicates what; `compare` and `effects` are the differences with their
intervals, `triggered` what never came into play, `wording` a difference in a few words. `fidelity` sets simulated
against real runs. Sentences and pages are `analysis.reports`'.
"""
