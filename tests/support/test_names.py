"""Whole tensors of sharded ones, with two processes."""

import torch
from accelerate import PartialState

from qerl_trl.support.names import full_tensor, full_tensors
from tests.ranks import on_ranks

#: uneven rows, fewer rows than processes, none at all, a norm, another dtype
SHAPES = [(7, 5), (8, 3), (1, 6), (1,), (9,), (2, 3, 4), (0, 4)]


def test_sharded_rows_are_gathered_together():
    def work(rank: int) -> tuple[int, int]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        from torch.distributed.tensor.debug import CommDebugMode

        PartialState(cpu=True)
        mesh = init_device_mesh("cpu", (2,))
        generator = torch.Generator().manual_seed(0)
        plain = [
            torch.randn(shape, generator=generator).to(d) for d in (torch.float32, torch.bfloat16) for shape in SHAPES
        ]
        sharded = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in plain]
        sharded[3] = torch.nn.Parameter(sharded[3])
        with CommDebugMode() as together:
            found = full_tensors(sharded)
        with CommDebugMode() as each:
            alone = [full_tensor(tensor) for tensor in sharded]
        for a, b, c in zip(found, alone, plain, strict=True):
            assert torch.equal(a, c) and torch.equal(b, c) and a.dtype == c.dtype and a.is_contiguous()
        return together.get_total_counts(), each.get_total_counts()

    for outcome in on_ranks(2, work, timeout=180):
        assert outcome.answer == (2, 2 * len(SHAPES)), outcome  # collectives: one per dtype, one per tensor
