"""Explanations of whole datasets: analyses of stored relevance, and files for other tools."""
