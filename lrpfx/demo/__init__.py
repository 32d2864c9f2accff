"""A demo on real data: train a small network on handwritten digits, explain it, and measure the explanations."""
