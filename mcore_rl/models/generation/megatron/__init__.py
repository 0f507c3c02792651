"""Generation by the training model itself."""
