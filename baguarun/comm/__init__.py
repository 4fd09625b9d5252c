"""Worker side: groups, engine, buckets, wrapper, algorithms."""
