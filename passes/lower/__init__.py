"""LOWER: prepare the traced forward and relevance, a graph of ATen operators, for a backend."""
