"""From predictors to integer-nanosecond tables."""
