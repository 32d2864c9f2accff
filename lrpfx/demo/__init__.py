"""Demos on real data: handwritten digits, photographs under trained classifiers, and sentences under a trained encoder; explanations are measured."""
