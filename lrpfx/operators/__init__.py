"""The operator table, one row of facts per operator, and the layers that rules and composites see."""
