"""MLflow: runs and the registry."""
