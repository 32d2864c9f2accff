"""NORMALIZE: bring every operation into one canonical form."""
