"""Interactive reports: one HTML page that works without a network."""
