"""Reading of models' ``config.json``: spellings, layer layouts and families as tables; the shipped ones beside them."""
