"""Whether something is the same: values as data that is compared, and models at a moment."""
