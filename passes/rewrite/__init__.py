"""REWRITE and FOLD: replace nodes by rule modules, and compute modified parameters once."""
