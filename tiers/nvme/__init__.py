"""State on NVMe: generation files that are written out of place, committed by one rename, checked and pinned."""
