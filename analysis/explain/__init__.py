"""Why requests waited: what blocked each of them at each step, who ran meanwhile, who was preempted for whom.

`waiting` lays a run's decisions on the lives of its requests, `following` goes through one life; `frames` has both as
pandas frames, `request` and `whole_run` as sentences.
"""
