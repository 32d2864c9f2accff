"""Code that runs after compilation: autograd functions that carry relevance, and the explainable module."""
