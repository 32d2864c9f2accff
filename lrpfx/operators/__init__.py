"""The operator table: one row of facts per operator."""
