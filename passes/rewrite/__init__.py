"""REWRITE and FOLD: nodes become rule modules."""
