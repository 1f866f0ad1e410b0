"""One run, from its configuration to a complete folder.

`run.execute` is the way through: `prepare` makes engines and inboxes ready, `run_folder` owns the files, `identity` and
`origin` say what it was made from, `ending` what it says when it is over; `parity` replays the tape of one.
"""
