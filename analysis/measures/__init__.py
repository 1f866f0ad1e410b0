"""The results of one run: metrics with the field's definitions, and checks of its records.

`summary.summarise` computes all of it, from these modules: `metrics` (latencies, rates), `occupancy` (usage over time),
`survival` (quantiles of values that are censored or too many for memory), `replicas` (a fleet), `steadiness` (whether
the engine kept up) and `checks` (whether the records agree). Comparing runs is the task of `analysis.comparison`.
"""
