"""NORMALIZE: one spelling for every operation."""
