"""Slow, obvious re-implementations to test against."""
