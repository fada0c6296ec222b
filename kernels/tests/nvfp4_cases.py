"""Random and nasty weights for the kernel tests."""

import os
import subprocess
import sys

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||a - e|| / ||e||; NaN (an element nobody wrote) never passes a comparison."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def random_weight(N: int, K: int, seed: int = 0, device: str = "cpu", per_row: bool = False):
    """packed, block_scale (bytes), global_scale with normal, subnormal and zero block scales and every code."""
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(0x20, 0x70, (N, K // 16), dtype=torch.uint8, generator=g)
    scale[:, ::5] &= 0x07  # subnormal, some of them zero
    scale[0, 0] = 0
    scale[-1, -1] = 0x7E
    shape = (N,) if per_row else (1,)
    global_scale = torch.exp2(torch.randint(3, 9, shape, generator=g).float())
    if per_row:
        global_scale *= 1.0 + torch.rand(shape, generator=g)
    return packed.to(device), scale.to(device), global_scale.to(device)


def in_aligned_rows(scale: torch.Tensor) -> torch.Tensor:
    """The same block scales in rows of whole 16 bytes, as `align_scale_rows` has them, but with other scales than zeros
    behind each row.
    """
    N, blocks = scale.shape
    rows = torch.full((N, -(-blocks // 16) * 16), 0x7E, dtype=scale.dtype, device=scale.device)
    rows[:, :blocks] = scale
    return rows[:, :blocks]


def leftovers() -> list[str]:
    """Scratch memory that launches left changed: counters not zero, cells not empty; waits for the device."""
    from qerl_nvfp4 import launch

    found = []
    for (device, place, name), buffer in launch._scratch.items():
        if buffer.dtype != torch.int32:
            continue  # what every launch writes before it reads it
        wrong = buffer != (-1 if name in ("pieces", "cells") else 0)
        if name == "ticket":  # above the count stands whose turn the buffers of cells have
            wrong = (buffer & 0xFFFF) != 0
        elif name == "cells":  # of the two buffers the next launch's is empty
            turn = int(launch._scratch[device, place, "ticket"][0]) >> 16 & 1
            wrong = wrong.view(2, -1)[turn]
        if wrong.any():
            at = wrong.flatten().nonzero()[:4].flatten().tolist()
            found.append(f"{name} of {'graphs' if place == -1 else 'a stream'} at {at}")
    return found


def in_a_fresh_process(file: str, seconds: float, *options: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a test file with Triton's compiler, which the interpreter of this process replaces."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-rA", *options, file]
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=seconds)
