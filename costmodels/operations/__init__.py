"""Physics of each operation: features, parameters and the time a roofline gives it."""
