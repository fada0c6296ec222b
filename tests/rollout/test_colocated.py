"""What the processes of one engine are told."""

import torch
from accelerate import PartialState

from qerl_trl.rollout.generation import agreed
from tests.ranks import on_ranks

ROOM = {"kv_cache_memory_bytes": 8 << 30, "gpu_memory_utilization": 0.01, "max_num_batched_tokens": 16384}
LESS = ROOM | {"kv_cache_memory_bytes": 2 << 30, "max_num_batched_tokens": 4096, "max_num_seqs": 11}


def test_processes_of_one_engine_are_told_the_same():
    """Each runs a scheduler: with steps of another size than its neighbour's it would wait in a collective that never comes, or sample other tokens."""

    def work(rank):
        PartialState(cpu=True)
        return agreed([ROOM, LESS][rank], torch.distributed.group.WORLD)

    one, two = (outcome.answer for outcome in on_ranks(2, work))
    assert one == two == LESS


def test_an_engine_of_one_process_takes_its_plan():
    assert agreed(ROOM, None) is ROOM
