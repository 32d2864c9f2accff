"""Samples: where they come from, prepared for a model and in batches, with errors by sample."""
