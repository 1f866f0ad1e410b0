"""Several runs: which of them are arms of one study, and what may be said of their differences.

`groups` and `arms` say what was varied and what replicates what, `naming` what an arm is called; `compare` and
`effects` are the differences with their intervals (`statistics`), `triggered` what never came into play. `fidelity`
sets simulated against real runs, request by request; `step_fidelity` step by step. Sentences and pages are
`analysis.reports`'.
"""
