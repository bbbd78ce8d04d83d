"""The work itself: torch's kernels and those of libraries, one file per operation."""
