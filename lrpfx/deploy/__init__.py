"""From an explainable module to files, and back."""
