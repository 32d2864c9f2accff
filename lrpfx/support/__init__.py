"""What has nothing to do with relevance: torch, signals, tables, resumable runs, and whether something is the same."""
