"""Data, rewards and evaluation of a task, and the curves of a run."""
