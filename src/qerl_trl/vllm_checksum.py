"""Checksums of packed weights that add up over tensor-parallel shards."""

import torch


def checksum(packed: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
    """Sums of the squared byte values of packed (N, K/2) and scale (N, K/16), both uint8.

    Shards of rows or columns add up to the whole matrix's sums. Enough to tell another checkpoint or another scale rule; the
    probe at start tells the rest.
    """
    p, s = packed.detach().view(torch.uint8), scale.detach().view(torch.uint8)
    squares = torch.arange(256, dtype=torch.int64, device=p.device) ** 2
    packed_sum = int((torch.bincount(p.flatten().int(), minlength=256) * squares).sum())
    scale_sum = int((torch.bincount(s.flatten().int(), minlength=256) * squares).sum())
    return packed_sum, scale_sum
