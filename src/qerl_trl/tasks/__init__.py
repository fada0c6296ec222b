"""Data, rewards and evaluation of a task."""
