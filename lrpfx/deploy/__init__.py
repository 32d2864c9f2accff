"""Saves explainable modules as program files, and loads those files."""
