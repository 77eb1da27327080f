"""`lamina train`: trains a GPT on real text under a memory budget."""
