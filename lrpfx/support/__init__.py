"""Helpers for torch, signals and callables, unrelated to relevance."""
