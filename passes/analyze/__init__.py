"""ANALYZE: facts that make rules cheaper."""
