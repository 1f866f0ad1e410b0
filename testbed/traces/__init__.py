"""Traces: readers, generators, transformations, token synthesis, and the inbox that feeds them to the loop.

A trace is rows of lengths and contents (`schema`); `arrange` makes a whole one, `stream` one that is never held.
`readers/` read files, `generators` draw from `arrivals`, `lengths` and `conversations`, `transforms/` change either.
`synthesis` makes the tokens when `inbox.TraceInbox` delivers a row as a request. `fingerprint` says whether two traces
are the same. They know no backend.
"""
