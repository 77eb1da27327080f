"""Which tier is home to what: pure, over plain data."""
