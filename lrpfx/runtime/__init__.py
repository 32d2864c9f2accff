"""What carries relevance: autograd functions, the explainable module, and rules on single modules without a graph."""
