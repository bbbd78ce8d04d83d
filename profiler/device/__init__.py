"""What the device is, what it reads of itself, and how work on it is timed."""
