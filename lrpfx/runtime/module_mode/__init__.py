"""Rules on single modules, without a graph."""
