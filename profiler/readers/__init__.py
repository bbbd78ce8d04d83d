"""The doors of files: one reader for each format, and one way from plain data to a checked dataclass."""
