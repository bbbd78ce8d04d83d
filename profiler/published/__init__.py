"""Timings that others published, as measurements."""
