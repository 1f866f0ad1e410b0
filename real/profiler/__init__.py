"""Measures what steps of chosen shapes take on the real engine: the grid of shapes, and how they are brought about."""
