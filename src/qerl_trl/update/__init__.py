"""A fast training step: forward and backward, each fast path next to its reference."""

#: a row's tokens, and its keys, are a multiple of this
MULTIPLE = 64


def padded(tokens: int) -> int:
    """Return a row's tokens including its final segment of zeros, at least one token long."""
    return (tokens // MULTIPLE + 1) * MULTIPLE
