"""Models and devices as numbers: shapes, Hugging Face configs, measured profiles, operator tables."""
