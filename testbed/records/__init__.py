"""The records of a run: their schema, the recorder, its tables, and the tape. Analysis reads what is written here.

`schema` is the contract: every column, unit and file. `recorder.RunRecorder` observes the loop and fills `tables`,
which `parquet` writes in groups; `operators` is a recorder too, and `recorders` joins several. `sender` delivers tokens
to clients. `tape` keeps all that the core was given in a real run, so that `testbed parity` can repeat its decisions.
"""
