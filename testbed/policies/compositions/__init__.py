"""Batch compositions: one class each, owning the algorithm of a step (`testbed.core.composition.Composition`)."""
