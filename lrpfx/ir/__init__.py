"""What the compiler knows of a graph's nodes, and of the arguments that a graph was made for."""
