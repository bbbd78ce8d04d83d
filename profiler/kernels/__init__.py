"""The work itself: torch's kernels and those of libraries, and which of them runs for a case."""
