"""CANONIZE: the same function, better to explain."""
