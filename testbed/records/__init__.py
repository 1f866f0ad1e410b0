"""The records of a run: their schema, the recorder, its tables, and the tape."""
