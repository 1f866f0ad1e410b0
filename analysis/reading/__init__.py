"""Records as columns: reads the files of a run folder in pieces, and converts them to and from pandas.

`rows` reads Parquet files, Arrow tables and frames in the same way, in batches; `request_columns` and `timeline` build
on it for requests and steps. `frames` converts to and from pandas; `files` reads the small files of a folder.
"""
