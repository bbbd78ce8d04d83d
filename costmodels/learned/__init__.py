"""From measurements to predictors: a physical baseline and what is learned on top."""
