"""A fast training step: forward and backward, each fast path next to its reference."""
