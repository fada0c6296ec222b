"""Rollouts: engine settings, syncs of the adapter and the noise, and the comparison of engine and trainer."""
