"""Memory that trainer and server have in common."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qerl_trl.rollout.shared_memory import SharedMemory

CPU = torch.device("cpu")
OTHER_PROCESS = """
import sys, torch
from qerl_trl.rollout.shared_memory import SharedMemory
piece = SharedMemory.open(sys.argv[1], 4096, torch.device("cpu"))
print(piece.proof(), piece.data[100:].sum().item())
"""


def test_another_process_of_this_user_sees_what_is_written():
    piece = SharedMemory.create(4096, CPU)
    path = Path("/dev/shm", piece.name)
    assert path.stat().st_mode & 0o777 == 0o600
    piece.data[100:] = 3
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, piece.name], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [piece.proof(), str(3 * 3996)], done.stderr
    assert path.exists()  # the other's end has not removed it
    piece.close()
    assert not path.exists()


def test_what_no_trainer_of_this_user_made_is_not_opened(tmp_path):
    piece = SharedMemory.create(4096, CPU)
    for name, size in (
        ("../etc/passwd", 4096),
        (f"qerl-{'0' * 32}", 4096),
        (piece.name, 8192),
        (piece.name + "\n", 4096),
    ):
        with pytest.raises(ValueError, match=r"no name of|No memory|another size"):
            SharedMemory.open(name, size, CPU)
    link = Path("/dev/shm", f"qerl-{'1' * 32}")
    link.symlink_to(tmp_path)
    try:
        with pytest.raises(ValueError, match="No memory"):
            SharedMemory.open(link.name, 4096, CPU)
    finally:
        link.unlink()


def test_too_little_memory_is_an_error_at_once():
    with pytest.raises(OSError):
        SharedMemory.create(2**50, CPU)
    assert not [
        name
        for name in os.listdir("/dev/shm")
        if name.startswith("qerl-") and os.path.getsize(f"/dev/shm/{name}") == 2**50
    ]
