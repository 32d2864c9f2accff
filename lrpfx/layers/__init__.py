"""Layers: calls as rules and composites see them."""
