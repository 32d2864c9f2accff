"""Demos on real data: handwritten digits, and sentences under a trained encoder; explanations of both are measured."""
