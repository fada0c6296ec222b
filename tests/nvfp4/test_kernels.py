"""Which kernel computes what: the lines of the banner and of `qerl-trl doctor`, and the matrices that are tuned."""

import pytest
import torch
from torch import nn

from qerl_trl import from_pretrained
from qerl_trl.model import loading
from qerl_trl.nvfp4 import fused, linear
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.tiny_models import write_packed_checkpoint

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
    assert fused.matrices_of(model()) == {"2 x q_proj + k_proj + v_proj": (128, 64, 3), "2 x o_proj": (64, 64, 1)}


def test_nothing_is_selected_where_no_kernel_runs():
    assert fused.selected_for_model(model()) == []
    assert fused.selected_for_model(nn.Linear(4, 4)) == []


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


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3"])
def test_the_matrices_of_a_checkpoint_are_those_of_the_loaded_model(tiny_model_dir, family):
    folder = tiny_model_dir(family)
    found = loading.matrices_of_checkpoint(folder)
    assert found == fused.packed_matrices(from_pretrained(folder))
    assert all(matrix.number == 2 for matrix in found), "layers"
    assert any(len(matrix.rows) == 3 for matrix in found) == (family != "phi3")


def test_the_matrices_of_a_packed_checkpoint_are_those_that_it_packs(tmp_path):
    write_packed_checkpoint(tmp_path / "packed", "qwen2", "compressed-tensors")
    found = loading.matrices_of_checkpoint(tmp_path / "packed")
    assert len(found) == 4 and found == fused.packed_matrices(from_pretrained(tmp_path / "packed"))


def test_one_line_per_matrix(l40s):
    lines = fused.selected_for_model(model(), rank=32)
    assert lines == [
        "2 x q_proj + k_proj + v_proj 128 x 64: portable up to 128 tokens, dense for more (heuristic)",
        "2 x o_proj 64 x 64: portable up to 128 tokens, dense for more (heuristic)",
    ]


def test_doctor_tells_what_the_user_measured(l40s, monkeypatch, tmp_path):
    from qerl_nvfp4 import measured, select
    from qerl_trl.cli import doctor

    monkeypatch.setenv("QERL_NVFP4_CACHE", str(tmp_path))
    monkeypatch.setenv("QERL_NVFP4_TUNED", "1")
    rows = [
        {"N": 37888, "K": 3584, "rank": 32, "tokens": tokens, "config": {"kernel": "dense", "pieces": 1}}
        for tokens in (64, 72)
    ]
    path = measured.write("NVIDIA L40S", 142, rows, lambda *_: True)
    select.forget_measured()
    device = torch.device("cuda")
    assert fused.measured_by_the_user(device) == ([str(path), "37888 x 3584, rank 32: 2 numbers of tokens"], "")
    lines = doctor._selected_kernels(device)["kernels"].split("\n")
    assert ["measured on this GPU" in line for line in lines] == [False, False, True, False]
    path.write_text("damaged")
    select.forget_measured()
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert fused.measured_by_the_user(device)[0] == []
    assert str(path) in fused.measured_by_the_user(device)[1]
    select.forget_measured()


def test_doctor_lists_what_a_7b_model_would_use(l40s):
    from qerl_trl.cli import doctor

    lines = doctor._selected_kernels(torch.device("cuda"))["kernels"].split("\n")
    assert [line.split()[1] for line in lines] == ["qkv", "o", "gate_up", "down"]
    assert all("skinny up to 16 tokens, mma up to 1536 tokens, dense for more" in line for line in lines)
