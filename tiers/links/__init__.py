"""How fast bytes move between tiers: models, probes and profiles of this machine's links."""
