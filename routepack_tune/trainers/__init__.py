"""What trainers need to carry out a plan."""
