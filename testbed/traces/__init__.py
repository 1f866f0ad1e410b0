"""Traces: readers, generators, transformations, token synthesis, and the inbox that feeds them to the loop."""
