"""`lamina doctor`: what this machine offers and what to mend."""
