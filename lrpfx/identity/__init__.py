"""Whether something is the same: values as data that is compared, models at a moment, and hashes of both."""
