"""Demos on real data: digits, photographs and sentences under trained networks."""
