"""Updates that a server takes: at 843f908 one that was refused had changed the engine already, and broadcast shapes, NaN and odd sigmas
were accepted. The worker extension of a server, over a model of two layers and two norms."""

import json
import math

import pytest
import torch
from torch import nn

from qerl_trl.rollout.engine import AdapterTensors, Update
from qerl_trl.rollout.weights import SharedMemory, UpdateLayout, checksum_of
from tests.faults.catalog import fault

pytestmark = pytest.mark.vllm

RANK, K, WIDTHS = 4, 8, (6, 2)  # q_proj and k_proj, fused
NORMS = ("model.layers.0.input_layernorm", "model.norm")


@pytest.fixture
def worker(monkeypatch):
    """A worker that holds an adapter, trained norms and noise."""
    from qerl_trl.rollout.vllm import state as states
    from qerl_trl.rollout.vllm.linear import AdaptedMethod
    from qerl_trl.rollout.vllm.worker import QeRLWorkerExtension

    class Method(AdaptedMethod):
        def create_weights(self, *args, **kwargs): ...
        def apply(self, *args, **kwargs): ...

    model, layer = nn.Module(), nn.Module()
    model.qkv_proj = layer
    layer.quant_method = Method(["q_proj", "k_proj"], RANK)
    layer.weight = nn.Parameter(torch.randn(sum(WIDTHS), K), requires_grad=False)
    layer.qerl_splits, layer.input_size_per_partition, layer.tp_size, layer.tp_rank = list(WIDTHS), K, 1, 0
    layer.register_buffer("adapter_a", torch.zeros(2 * RANK, K, dtype=torch.bfloat16))
    layer.register_buffer("adapter_b", torch.zeros(sum(WIDTHS), RANK, dtype=torch.bfloat16))
    norms = {name: nn.RMSNorm(K) for name in NORMS}
    model.norms = nn.ModuleList(norms.values())
    monkeypatch.setattr(states, "find_norms", lambda *args: norms)
    worker = QeRLWorkerExtension()
    worker.device = torch.device("cpu")
    worker._qerl_rollout_state = states.RolloutState(model)
    assert taken(send(worker, *update())) == {"layers": 2, "norms": 1}
    assert put(worker, draw=(0.1, 1, 2, 3))["sigma_effective"] > 0.01
    return worker


def update(seed=0, **changes):
    """An adapter and a norm; `changes` replaces tensors, by a:NAME, b:NAME or norm:NAME."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "a:q_proj": (RANK, K), "b:q_proj": (WIDTHS[0], RANK), "a:k_proj": (RANK, K), "b:k_proj": (WIDTHS[1], RANK), f"norm:{NORMS[1]}": (K,),
    }  # fmt: skip
    made = {name: torch.randn(shape, generator=generator) for name, shape in tensors.items()} | changes
    names = [name[2:] for name in made if name.startswith("a:")]
    adapter = {name: AdapterTensors(made[f"a:{name}"], made[f"b:{name}"], 2.0) for name in names}
    return adapter, {name[5:]: value for name, value in made.items() if name.startswith("norm:")}


def put(worker, update=None, draw=None) -> dict:
    return worker.qerl_put(json.dumps({"update": update, "noisy": NORMS[:1], "draw": draw}))


def send(worker, adapter, norms, draw=None, damage=0) -> dict:
    layout = UpdateLayout.of(made := Update(adapter, norms), torch.bfloat16)
    memory = SharedMemory(layout.nbytes, torch.device("cpu"))
    layout.pack(made, memory.data)
    checksum = checksum_of(memory.data)
    memory.data[5] ^= damage
    return put(
        worker, {"layout": layout.text, "memory": memory.name, "checksum": checksum, "fingerprint": checksum}, draw
    )


def taken(answer: dict) -> dict:
    assert "error" not in answer
    return answer


def everything(worker) -> list[torch.Tensor]:
    model = worker._qerl_rollout_state.model
    return [tensor.clone() for tensor in [*model.parameters(), *model.buffers()]]


BAD = {
    "a layer that is not there": ({"a:v_proj": torch.ones(RANK, K), "b:v_proj": torch.ones(6, RANK)}, "v_proj"),
    "a norm that is not there": ({"norm:model.nowhere": torch.ones(K)}, "model.nowhere"),
    "a rank beyond the buffers": ({"a:k_proj": torch.ones(9, K), "b:k_proj": torch.ones(2, 9)}, "reserved 4"),
    "halves of two ranks": ({"b:k_proj": torch.ones(2, RANK - 1)}, "(4, 8)"),
    "rows to broadcast": ({"b:k_proj": torch.ones(1, RANK)}, "2 x 8"),
    "columns to broadcast": ({"a:k_proj": torch.ones(RANK, 1)}, "2 x 8"),
    "a norm to broadcast": ({f"norm:{NORMS[1]}": torch.ones(1)}, NORMS[1]),
    "NaN in the last layer": ({"b:k_proj": torch.full((2, RANK), math.nan)}, "k_proj.lora_B holds NaN"),
    "infinity": ({"a:k_proj": torch.full((RANK, K), math.inf)}, "k_proj.lora_A holds NaN or inf"),
    "beyond bf16 once alpha/r is in": ({"b:k_proj": torch.full((2, RANK), 3e38)}, "k_proj.lora_B holds NaN or inf"),
    "NaN in a norm": ({f"norm:{NORMS[1]}": torch.full((K,), math.nan)}, f"{NORMS[1]} holds NaN"),
}


@fault("S.update_refused_after_change")
@fault("S.update_values_bad", recovered=True)
@pytest.mark.parametrize("case", BAD)
def test_an_update_that_is_refused_has_changed_nothing(worker, case):
    changes, words = BAD[case]
    before, contents = everything(worker), worker.qerl_contents()
    error = send(worker, *update(1, **changes))["error"]
    assert words in error and ("nothing has changed" in error or "vLLM" in error), error
    assert all(torch.equal(left, right) for left, right in zip(before, everything(worker), strict=True))
    assert worker.qerl_contents() == contents and not contents["damaged"]
    assert taken(send(worker, *update(1))) == {"layers": 2, "norms": 1}  # a good one is taken after it
    after = worker.qerl_contents()
    assert after["received"] != contents["received"] and not after["damaged"]


@fault("S.update_refused_after_change")
@pytest.mark.parametrize("noise", [(0.1, 1), (0.1, 1, 2, 3, 4)])
def test_an_update_with_noise_that_is_refused_has_changed_nothing(worker, noise):
    before, contents = everything(worker), worker.qerl_contents()
    assert "Error" in send(worker, *update(1), noise)["error"]
    assert all(torch.equal(left, right) for left, right in zip(before, everything(worker), strict=True))
    assert worker.qerl_contents() == contents and not contents["damaged"]
    assert send(worker, *update(1), (0.2, 1, 2, 4))["sigma_effective"] == pytest.approx(0.2, rel=0.8)


@pytest.mark.parametrize(
    ("tensor", "name"),
    [("adapter_a", "q_proj.lora_A"), ("adapter_b", "q_proj.lora_B")],
)
def test_what_is_overwritten_is_named(worker, tensor, name):
    getattr(worker._qerl_rollout_state.model.qkv_proj, tensor)[0, 0] += 1
    assert worker.qerl_contents()["damaged"] == [name]


def test_an_adapter_of_a_smaller_rank_leaves_nothing_of_the_one_before(worker):
    adapter, norms = update(2)
    small = {name: AdapterTensors(t.a[:2], t.b[:, :2], 1.5) for name, t in adapter.items()}
    assert taken(send(worker, small, norms)) == {"layers": 2, "norms": 1}
    layer = worker._qerl_rollout_state.model.qkv_proj
    assert layer.adapter_b[:, 2:].abs().max() == 0 and layer.adapter_a[2:RANK].abs().max() == 0
    assert torch.equal(layer.adapter_b[: WIDTHS[0], :2], (small["q_proj"].b * 1.5).bfloat16())
    assert worker.qerl_contents()["damaged"] == []


@fault("S.update_refused_after_change")
def test_an_update_that_arrives_damaged_has_changed_nothing(worker):
    before = everything(worker)
    assert "arrived damaged" in send(worker, *update(1), damage=1)["error"]
    assert all(torch.equal(left, right) for left, right in zip(before, everything(worker), strict=True))
