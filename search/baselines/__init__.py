"""Published planners, to be compared with."""
