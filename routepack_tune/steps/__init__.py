"""Step batches: read, made, described."""
