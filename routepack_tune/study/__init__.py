"""The verbs around a study, and its folder."""
