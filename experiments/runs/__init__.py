"""One run, from its configuration to a complete run folder.

`run.execute` makes a run. `prepare` builds engines and inboxes, `run_folder` owns the files, `identity` and `origin`
record what the run is made from, `ending` makes its notes and messages. `parity` replays the tape of a run.
"""
