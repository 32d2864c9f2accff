"""Explanations of photographs and sentences: from what a user has to what a user wants to look at."""
