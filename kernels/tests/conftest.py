"""Kernel tests: the interpreter on a CPU, the real kernels on a GPU (marker `gpu`), compilation for sm_90 anywhere."""

import inspect
import os
import sys

import pytest
import torch
from nvfp4_cases import COMPILING

os.environ["QERL_NVFP4_TUNED"] = "0"  # only test_kernels_measured.py reads measurements of this machine
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported


#: marker -> what its tests need
NEEDS = {
    "gpu": "an NVIDIA GPU",
    "hopper": "compute capability 9.0 and a Triton with Gluon's names",
    "gluon": "a Triton with Gluon's names",
    "compiled": "Triton's compiler: see nvfp4_cases.in_a_fresh_process",
}


def pytest_configure(config):
    for name, needs in NEEDS.items():
        config.addinivalue_line("markers", f"{name}: needs {needs}")


def pytest_collection_modifyitems(items):
    lacking = {"gpu", "hopper", "gluon"} | ({"compiled"} if not COMPILING else set())
    if torch.cuda.is_available():
        from qerl_nvfp4 import ops

        lacking -= {"gpu"} | ({"gluon"} if ops.use_gluon(0) else set())
        if "gluon" not in lacking and torch.cuda.get_device_capability()[0] == 9:
            lacking -= {"hopper"}
    for item in items:
        for name in lacking:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=f"needs {NEEDS[name]}"))


@pytest.fixture(autouse=True)
def no_kernel_was_replaced():
    """A kernel that does not compile falls back to a slower one with the right result: fail all the same."""
    yield
    if "qerl_nvfp4.fallback" in sys.modules:
        assert not sys.modules["qerl_nvfp4.fallback"].refused


@pytest.fixture
def pretend(monkeypatch):
    """pretend(name, multiprocessors, capability, KiB of shared memory): the GPU of the rest of the test."""
    from qerl_nvfp4 import launch, ops, select

    def be(name: str, sms: int, capability: tuple[int, int], shared: int = 227) -> None:
        for module in (launch, ops, select):
            monkeypatch.setattr(module, "device_properties", lambda index: (name, sms, capability))
        monkeypatch.setattr(select, "shared_memory_limit", lambda index: shared * 1024)
        monkeypatch.setattr(ops, "is_available", lambda device=None: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        select.forget_measured()

    yield be
    select.forget_measured()


@pytest.fixture
def emulated(monkeypatch):
    """launch.launch on CPU tensors, in the emulator of a Hopper; the answer lists the kernels that were launched."""
    import gluon_emulator

    from qerl_nvfp4 import launch

    source, sms = gluon_emulator.source(), gluon_emulator.SMS
    monkeypatch.setattr(launch, "device_properties", lambda index: ("a Hopper", sms, (9, 0)))
    monkeypatch.setattr(launch, "_scratch", {})
    monkeypatch.setattr(launch, "_captured", [])
    state = {"seed": 0, "resident": 10**6, "launches": []}

    def launcher(kernel, *grid):
        def start(*args, **kwargs):
            parameters = inspect.signature(kernel.fn).parameters
            options = {k: kwargs.pop(k) for k in [*kwargs] if k not in parameters}
            arguments = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
            assert set(arguments) == set(parameters), "an argument is missing, or has no parameter"
            early = arguments["V"].PDL if "V" in arguments else arguments.get("PDL", False)
            assert options.get("launch_pdl", False) == early
            name, later = kernel.fn.__name__, []
            arguments |= {"INTERP": False} if "INTERP" in arguments else {}
            fn = source.kernel(name)
            assert list(inspect.signature(fn).parameters) == list(parameters)
            if name == "skinny_kernel":  # a program waits for later ones: all must be resident
                programs, threads = -(-grid[0] // sms), options["num_warps"] * 32
                assert programs <= 16 and programs * threads <= 48 * 32
                assert programs * threads * options["maxnreg"] <= 65536
            if options.get("launch_pdl"):
                x = arguments["x_ptr"] if "x_ptr" in arguments else arguments["pointers"][0]
                later = [t for t in (x, *launch._scratch.values()) if t.is_contiguous()]
            gluon_emulator.machine.launch(fn, grid, arguments, state["seed"], state["resident"], later)
            state["launches"].append(name)
            state["seed"] += 1

        return start

    monkeypatch.setattr(launch, "launcher", launcher)
    return state
