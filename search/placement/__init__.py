"""Which expert lives on which expert-parallel rank, and what moving it costs."""
