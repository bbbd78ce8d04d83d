"""The planner's settings for one cluster: an Optuna study."""
