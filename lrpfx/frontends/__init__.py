"""Capture a model as a graph."""
