"""Passes over lowered programs: graphs of ATen operators, from the trace of forward and relevance to what a backend takes."""
