"""The compiler's knowledge about operators, the nodes of a graph, and the arguments that a graph accepts."""
