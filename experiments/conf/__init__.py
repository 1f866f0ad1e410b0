"""Hydra configuration files, one folder per group."""
