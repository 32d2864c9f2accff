"""What the compiler knows of operators, of a graph's nodes, and of the arguments that a graph was made for."""
