"""Helpers for torch, signals, callables, tables and optional packages, unrelated to relevance."""
