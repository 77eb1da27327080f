"""Checkpoints: atomic folders of JSON, pinned generations and plane files; saved, loaded, kept and removed."""
