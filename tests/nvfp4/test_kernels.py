"""Which kernel computes what: the lines of the banner and of `qerl-trl doctor`."""

import pytest
import torch
from torch import nn

from qerl_trl.nvfp4 import kernels, linear
from qerl_trl.nvfp4.linear import NVFP4Linear

qerl_nvfp4 = pytest.importorskip("qerl_nvfp4")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = NVFP4Linear(64, 64), NVFP4Linear(64, 64)
        self.k_proj = self.v_proj = None
        self.k_proj, self.v_proj = NVFP4Linear(64, 32), NVFP4Linear(64, 32)


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer


def model():
    blocks = nn.ModuleList([Attention(), Attention()])
    blocks[0].o_proj = Adapted(blocks[0].o_proj)
    return nn.Sequential(blocks, nn.Linear(64, 8))


def test_matrices_are_those_of_the_engine():
    assert kernels.matrices_of(model()) == {"2 x q_proj + k_proj + v_proj": (128, 64), "2 x o_proj": (64, 64)}


def test_nothing_is_selected_where_no_kernel_runs():
    assert kernels.selected_for_model(model()) == []
    assert kernels.selected_for_model(nn.Linear(4, 4)) == []


@pytest.fixture
def l40s(monkeypatch):
    from qerl_nvfp4 import ops, select

    for module in (select, ops):
        monkeypatch.setattr(module, "device_properties", lambda index: ("NVIDIA L40S", 142, (8, 9)))
    monkeypatch.setattr(select, "shared_memory_limit", lambda index: 99 * 1024)
    monkeypatch.setattr(ops, "is_available", lambda device: True)
    monkeypatch.setattr(ops, "_device_index", lambda device: 0)
    monkeypatch.setattr(linear, "_kernels", lambda device: (qerl_nvfp4, ""))
    select.explain.cache_clear()
    yield
    select.explain.cache_clear()


def test_one_line_per_matrix(l40s):
    lines = kernels.selected_for_model(model(), rank=32)
    assert lines == [
        "2 x q_proj + k_proj + v_proj 128 x 64: portable up to 128 tokens, dense for more (heuristic)",
        "2 x o_proj 64 x 64: portable up to 128 tokens, dense for more (heuristic)",
    ]


def test_doctor_lists_what_a_7b_model_would_use(l40s):
    from qerl_trl.cli import doctor

    lines = doctor._selected_kernels(torch.device("cuda"))["kernels"].split("\n")
    assert [line.split()[1] for line in lines] == ["qkv", "o", "gate_up", "down"]
    assert all("skinny up to 16 tokens, portable up to 128 tokens, dense for more" in line for line in lines)
