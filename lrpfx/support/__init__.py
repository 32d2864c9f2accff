"""What torch, signals and callables need that has nothing to do with relevance."""
