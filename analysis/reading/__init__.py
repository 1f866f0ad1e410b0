"""Records as columns: what of a run folder is read, in pieces, and how it gets in and out of pandas.

`rows` reads Parquet, Arrow and frames alike, batch by batch; `request_columns` and `timeline` are requests and steps on
top of it; `frames` is pandas' side, `files` the small files of a folder.
"""
