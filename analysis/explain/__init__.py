"""Why requests waited: what blocked each request at each step, which others ran, and which preempted which.

`waiting` relates a run's decisions to the times of all requests, `taking` says who had what others waited for, and
`following` follows one request. `frames` returns them as pandas frames; `request`, `whole_run` and `slowest` write them
as sentences.
"""
