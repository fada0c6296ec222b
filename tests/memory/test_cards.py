"""Cards by the names that people and machines have for them."""

import pytest

from qerl_trl.memory.plan import CARDS, OTHERS, gpu_of_card


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("4090", 24),
        ("rtx4090", 24),
        ("NVIDIA GeForce RTX 4090", 24),
        ("A10G", 24),
        ("NVIDIA A10G", 24),
        ("NVIDIA H100 80GB HBM3", 80),
        ("NVIDIA H100 PCIe", 80),
        ("NVIDIA H100 NVL", 94),
        ("A100 80GB", 80),
        ("A100 40GB", 40),
        ("A100", 80),
        ("NVIDIA A100-SXM4-40GB", 40),
        ("NVIDIA A100 80GB PCIe", 80),
        ("RTX 4060 Ti 16GB", 16),
        ("NVIDIA RTX 6000 Ada Generation", 48),
        ("RTX PRO 6000", 96),
        *(CARDS | OTHERS).items(),
    ],
)
def test_a_card_is_known_by_its_name(name, gigabytes):
    assert gpu_of_card(name).total == gigabytes * 10**9


@pytest.mark.parametrize("name", ["", "RTX", "H1000", "24GB", "A1", "T4", "Tesla V100-SXM2-32GB"])
def test_another_one_is_not_guessed(name):
    with pytest.raises(ValueError, match=r"is none of RTX 3060, .*--gpu-gib"):
        gpu_of_card(name)
