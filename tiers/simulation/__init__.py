"""A training step without doing it: as plain data, in simulated time."""
