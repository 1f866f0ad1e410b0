"""Cost models: what a step costs, as integer ns. They know shapes of batches, models and devices; no clock, no core."""
