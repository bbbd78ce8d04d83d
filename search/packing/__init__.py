"""Which sample goes into which microbatch."""
