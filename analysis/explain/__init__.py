"""Why requests waited: what blocked each request at each step, which others ran, and which preempted which.

`waiting` relates a run's decisions to the times of all requests, `following` follows one request. `frames` returns both
as pandas frames; `request` and `whole_run` write them as sentences.
"""
