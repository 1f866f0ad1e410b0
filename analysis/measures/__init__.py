"""What one run comes to: metrics with the field's definitions, and what must hold of its records.

`summary.summarise` is the whole of it, from these parts: `metrics` (latencies, rates), `occupancy` (over time),
`survival` (quantiles of what is too much, or never ended), `replicas` (a fleet), `steadiness` (did it keep up) and
`checks` (do the records agree). Knows no second run: comparing is `analysis.comparison`'s.
"""
