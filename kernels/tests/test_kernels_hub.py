"""The folder as the Kernel Hub serves it: staged like a build, loaded by the `kernels` library."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from nvfp4_cases import random_weight, relative_error

import qerl_nvfp4

pytest.importorskip("kernels.load")  # not `kernels`: our own folder answers to that name where the library is missing
import kernels

PROJECT = Path(__file__).resolve().parents[1]
NAMESPACE = "_qerl_nvfp4_test_build"


@pytest.fixture(scope="module")
def from_hub(tmp_path_factory):
    """The package under build/torch-<backend>/, with the two files that the builder adds."""
    backend = "cuda" if torch.cuda.is_available() else "cpu"
    general = tomllib.loads((PROJECT / "build.toml").read_text())["general"]
    assert backend in general["backends"]
    root = tmp_path_factory.mktemp("kernel")
    variant = root / "build" / f"torch-{backend}"
    ignored = shutil.ignore_patterns("__pycache__", "_ops.py")
    shutil.copytree(PROJECT / "torch-ext" / "qerl_nvfp4", variant, ignore=ignored)
    names = f"def add_op_namespace_prefix(name):\n    return f'{NAMESPACE}::{{name}}'\n"
    (variant / "_ops.py").write_text(f"import torch\nops = torch.ops.{NAMESPACE}\n\n\n{names}")
    metadata = {"id": "qerl_nvfp4_test", "python-depends": [], "backend": {"type": backend}}
    metadata |= {key: general[key] for key in ("name", "version", "license")}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    return kernels.get_local_kernel(root, backend=backend, trust_remote_code=True)


def test_loads_beside_the_installed_package_and_computes_the_same(from_hub):
    assert from_hub is not qerl_nvfp4
    assert "qerl_nvfp4" in from_hub.describe()
    assert hasattr(getattr(torch.ops, NAMESPACE), "linear"), "operators have a namespace of their own"
    assert from_hub.linear.__module__ != qerl_nvfp4.linear.__module__
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = random_weight(64, 256, device=device)
    x = torch.randn(5, 256, dtype=torch.bfloat16, device=device)
    assert torch.equal(from_hub.linear(x, *weight), qerl_nvfp4.linear(x, *weight))
    dense = from_hub.dequantize(*weight)
    assert torch.equal(dense, qerl_nvfp4.dequantize(*weight))
    assert relative_error(from_hub.linear(x, *weight), x.double() @ dense.double().T) < 6e-3
