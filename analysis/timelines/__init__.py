"""Timelines for Perfetto: steps, request lifetimes, swaps and KV counters of one run, or of two runs for comparison.

`export.write_timeline` writes a timeline; `chrome_trace` is the file format, `device_trace` adds torch's profile.
"""
