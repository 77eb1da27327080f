"""Which parameters are fetched together, how they lie in one flat layout, and who owns which slice of it."""
