"""CANONIZE: bring the network into a form that is easier to explain."""
