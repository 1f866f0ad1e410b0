"""Policies: small classes with one job each, chosen by name or by `_target_`. They know no devices."""
