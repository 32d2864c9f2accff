"""Reports on a model and its relevance: tables, drawings, and interactive pages of HTML."""
