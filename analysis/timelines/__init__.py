"""Timelines for Perfetto: steps, request lifetimes, swaps and KV counters of one run, or of two beside each other.

`export.write_timeline` writes one; `chrome_trace` is the format, `device_trace` what torch's profiler saw.
"""
