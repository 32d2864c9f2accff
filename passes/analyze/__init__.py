"""ANALYZE: infer facts that make rules cheaper."""
