"""Rollouts: what an engine is told, how it is kept up to date, and the check that it computes what the trainer computes."""
