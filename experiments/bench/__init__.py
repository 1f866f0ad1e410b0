"""Benchmarks: each prints a table; none decides a test."""
