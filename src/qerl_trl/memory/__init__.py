"""Memory planning: a run's workload, its bytes on a GPU, and the plan made from both."""
