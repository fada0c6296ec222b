"""The training step's speed: what is computed in a forward and a backward, each fast path beside its reference."""
