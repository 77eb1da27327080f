"""What ranks that share a model's state do together, and what they tell each other."""
