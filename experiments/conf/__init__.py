"""Hydra configuration files, one folder a group."""
