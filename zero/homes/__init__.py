"""Where segments live: chosen, filled at the start, resumed, and changed while training."""
