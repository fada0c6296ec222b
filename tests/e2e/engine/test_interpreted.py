"""The probe in bf16, despite its rounding. The engine runs our kernels, in Triton's interpreter on a CPU."""

import dataclasses

import pytest
import torch

from qerl_trl.rollout.engine import RolloutError
from tests.e2e.engine.engines import adapter_on, dense, packed, stub_generation, write_model

#: Triton reads it at import
ENVIRONMENT, COLD = {"TRITON_INTERPRET": "1"}, True


@pytest.mark.parametrize("base", ["nvfp4", "dense"])
def test_the_probe_sees_through_the_rounding_of_bf16(base, tmp_path):
    path = write_model(tmp_path)
    policy = adapter_on(packed(path, dtype="bfloat16") if base == "nvfp4" else dense(path, torch.bfloat16))
    g = stub_generation(policy, share=base == "nvfp4")
    found = g.probe_result
    assert found.fault is None and found.base_difference < 0.5 * found.limits[0]
    assert found.difference < 0.7 * found.limits[1]
    put_adapter = g.engine.put_adapter

    def halved(adapter, norms):
        put_adapter({n: dataclasses.replace(t, scaling=t.scaling * 0.5) for n, t in adapter.items()}, norms)

    g.engine.put_adapter = halved
    with pytest.raises(RolloutError, match="the adapter acts otherwise"):
        g.run_probe()
