"""The layer, as rules and composites see it."""
