"""What runs: autograd functions that carry relevance, and the explainable module."""
