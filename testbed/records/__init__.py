"""What a run writes down: the schema of its records, the recorder, their tables, and the tape."""
