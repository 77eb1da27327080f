"""Gradients of this rank's shards: summed over the ranks, kept, spilled, and their norm."""
