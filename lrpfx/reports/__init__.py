"""Reports on a model and its relevance."""
