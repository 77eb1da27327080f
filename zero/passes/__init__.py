"""The forward and backward pass: hooks that fetch and collect, and blocks that are computed again."""
