"""Measures the times of steps of chosen shapes on the real engine: the grid of shapes, and how such steps are made."""
