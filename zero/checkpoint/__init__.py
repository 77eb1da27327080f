"""One rank's part of a checkpoint."""
