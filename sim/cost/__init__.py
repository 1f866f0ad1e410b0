"""Cost models: the time of a step, in whole ns. They know batch shapes, models and devices; no clock, no scheduler."""
