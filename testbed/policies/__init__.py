"""Policies: small classes with one job each, chosen by name or by `_target_`. They know no devices.

`compositions/` decide a step, `orders/` (and `queue_order`: FCFS) whom it considers first, `admission` who may start,
`victim` who is preempted, `preemption` how, and `cost_aware` which cached block is evicted. Only an `oracle` may know
the future. `config` has their settings; a policy that needs more than its arguments gets a `context` once. A preset
(experiments/conf/scheduler) chooses one of each.
"""
