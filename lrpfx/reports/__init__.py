"""What lrpfx tells about a model and its relevance."""
