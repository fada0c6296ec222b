"""Whole tensors whatever shards them, with two processes. Names of modules: test_lora.py and whoever uses them."""

import torch
from accelerate import PartialState

from qerl_trl.support.names import full_tensor, full_tensors
from tests.ranks import on_ranks

#: uneven rows, fewer rows than processes, none at all, a norm, another dtype
SHAPES = [(7, 5), (8, 3), (1, 6), (1,), (9,), (2, 3, 4), (0, 4)]


def test_rows_that_are_shared_out_are_gathered_together():
    def work(rank: int) -> dict:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
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
        others = [
            plain[0],
            distribute_tensor(plain[0], mesh, [Replicate()]),
            distribute_tensor(plain[0], mesh, [Shard(1)]),
            sharded[0],
        ]
        return {
            "equal": all(torch.equal(a, b) and torch.equal(a, c) and a.dtype == c.dtype and a.is_contiguous() for a, b, c in zip(found, alone, plain, strict=True)),
            "collectives": together.get_total_counts(),
            "alone": each.get_total_counts(),
            "others": all(type(t) is torch.Tensor and torch.equal(t, plain[0]) for t in full_tensors(others)),
            "none": full_tensors([]),
        }  # fmt: skip

    for outcome in on_ranks(2, work, timeout=180):
        found = outcome.answer
        assert isinstance(found, dict), outcome
        assert found["equal"] and found["others"] and found["none"] == []
        assert found["collectives"] == 2 and found["alone"] == 2 * len(SHAPES)  # one per dtype
