"""The memory tiers: arenas under a byte budget, a GPU's memory, and what this process may take."""
