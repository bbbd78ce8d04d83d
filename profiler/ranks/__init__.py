"""Between ranks: agreement, exchanges, slow ranks."""
