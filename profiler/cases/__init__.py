"""What to time: cases, which of them, in which rounds, and which results to doubt."""
