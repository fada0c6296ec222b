"""The probe against engines that are the trainer's own model in bf16, computed in another order, with one fault each,
and its record of real engines on a GPU."""

import contextlib
import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from qerl_trl.model.lora import register_nvfp4_lora
from qerl_trl.noise.generator import standard_noise
from qerl_trl.noise.hooks import NormNoise
from qerl_trl.noise.norms import find_noisy_norms
from qerl_trl.nvfp4.linear import NVFP4Linear, compute_dtype
from qerl_trl.rollout import probe as probing
from qerl_trl.rollout.engine import AdapterTensors
from qerl_trl.rollout.probe import other_arithmetic
from qerl_trl.rollout.spec import rollout_layers
from tests.faults.stand_in import StandIn
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import probe_separation  # noqa: E402


class Faulty(StandIn):
    """The stand-in with an adapter changed by `fault`."""

    def __init__(self, policy, fault=dict, base_fault=None):
        self.fault = fault
        super().__init__(policy, base_fault)

    def put_adapter(self, adapter, norms):
        super().put_adapter(self.fault(dict(adapter)), norms)


def quantized(dense: nn.Module, scale_rule: str = "rtn") -> nn.Module:
    model = copy.deepcopy(dense)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, NVFP4Linear.from_linear(layer, scale_rule))
    return model


def with_adapter(model: nn.Module):
    """A trained adapter of rank 8 and alpha 16 on every linear layer."""
    torch.manual_seed(0)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(model.requires_grad_(False), register_nvfp4_lora(lora))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.05)
    return policy


def of_shape(layers: int, spread: float) -> nn.Module:
    return make_tiny_model("qwen2", num_hidden_layers=layers, initializer_range=spread)


@pytest.fixture(scope="module")
def dense():
    return of_shape(4, 0.2)


@pytest.fixture(scope="module")
def policy(dense):
    return with_adapter(quantized(dense))


def asked(engine: Faulty, model, dtype=None) -> probing.Probe:
    prompts = probing.prompts_of([], 128, 64)
    return probing.Probe(engine, model, prompts, torch.device("cpu"), dtype or compute_dtype(model))


def run(engine: Faulty, policy) -> probing.ProbeResult:
    def tensors(layer):
        return AdapterTensors(layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"])

    def sync():
        engine.put_adapter({name: tensors(layer) for name, layer in rollout_layers(policy).items()}, {})

    return asked(engine, policy).adapter(sync)[0]


@pytest.mark.parametrize(("layers", "spread"), [(4, 0.2), (5, 0.05)])  # effects of rounding differ by a factor of 4
def test_a_right_engine_passes_with_a_margin(layers, spread):
    policy = with_adapter(quantized(of_shape(layers, spread)))
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    engine = Faulty(policy)
    result = run(engine, policy)
    assert result.fault is None and not result.undecided
    assert result.base_difference < 0.5 * (probing.CLEAN * result.rounding + probing.FLOOR[torch.bfloat16])
    assert result.difference < 0.7 * result.limits[1]
    assert all(torch.equal(before[name], parameter) for name, parameter in policy.named_parameters())
    lost = [name for name, up in engine.policy.named_parameters() if "lora_B" in name and not up.any()]
    assert not lost  # the trainer's own adapter is in the engine again


def test_without_an_adapter_the_weights_are_compared(dense):
    model = copy.deepcopy(dense).float()  # trained in float32, computed with in bfloat16
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}

    def check(engine):
        return asked(engine, model, torch.bfloat16).adapter(lambda: None)

    engine = Faulty(dense)
    result, clean = check(engine)
    assert clean is not None and (clean.difference, clean.rounding) == (result.base_difference, result.rounding)
    assert result.fault is None and result.effect is None and not result.undecided
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    with torch.no_grad():
        engine.policy.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    assert "other weights or norms" in check(engine)[0].fault


def kept(chosen):
    """A fault that loses the adapter of the other layers."""
    return lambda adapter: {name: tensors for name, tensors in adapter.items() if chosen(name)}


def scaled(factor):
    return lambda adapter: {name: replace(t, b=t.b * factor) for name, t in adapter.items()}


def exchanged(adapter):
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}
    parts = {name: name.rpartition(".") for name in adapter}
    return {name: adapter[f"{parent}.{other.get(leaf, leaf)}"] for name, (parent, _, leaf) in parts.items()}


FAULTS = {
    "lost": kept(lambda name: False),
    "doubled": scaled(2.0),
    "half of the layers lost": kept(lambda name: int(name.split(".")[2]) % 2 == 0),
    "attention lost": kept(lambda name: ".self_attn." not in name),
    "k and v exchanged": exchanged,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_adapter_is_found(policy, fault):
    result = run(Faulty(policy, FAULTS[fault]), policy)
    assert "the adapter acts otherwise" in result.fault and len(result.fault) < 120


@pytest.mark.parametrize("scale_rule", [None, "four_over_six"])
def test_other_weights_are_found_without_an_adapter(dense, policy, scale_rule):
    def put_in(base):
        layers = dict((quantized(dense, scale_rule) if scale_rule else dense).named_modules())
        for name, module in list(base.named_modules()):
            if isinstance(module, NVFP4Linear):
                parent = base.get_submodule(name.rpartition(".")[0])
                parent.base_layer = copy.deepcopy(layers[name.removesuffix(".base_layer")])

    assert "other weights or norms" in run(Faulty(policy, base_fault=put_in), policy).fault


def test_a_dense_base_passes_and_constant_logits_are_undecided(dense):
    policy = with_adapter(copy.deepcopy(dense))
    result = run(Faulty(policy), policy)
    assert result.fault is None and not result.undecided
    policy.get_base_model().model.norm.weight.data.zero_()  # every logit is 0
    result = run(Faulty(policy), policy)
    assert result.undecided and result.fault is None and "undecided" in str(result)


@pytest.mark.parametrize("autocast", [None, "accelerate"])
@pytest.mark.parametrize("packed", [True, False], ids=["nvfp4", "dense"])
def test_the_other_arithmetic_is_float32_of_the_same_model(dense, packed, autocast):
    """As its float32 copy computes, also under autocast as Accelerate leaves it on float32 weights."""
    model = (quantized(dense) if packed else copy.deepcopy(dense)).eval()
    if autocast:
        model.float()
        model._original_forward = model.forward
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    ids = torch.randint(0, 128, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(input_ids=ids).logits.float()
        exact = copy.deepcopy(dense).eval()
        if packed:
            for name, module in model.named_modules():
                if isinstance(module, NVFP4Linear):
                    exact.get_submodule(name).weight.copy_(module.dequantize())
        reference = exact.float()(input_ids=ids).logits
        with other_arithmetic(model, torch.bfloat16):
            other = model(input_ids=ids).logits.float()
        again = model(input_ids=ids).logits.float()
    assert torch.equal(plain, again)
    assert (other - reference).abs().max() < 1e-2 * (plain - reference).abs().max()


def run_noise(policy, fault=None) -> probing.ProbeResult:
    """The probe of the noise, if `fault` changes {name: noise} in the engine; both models are clean afterwards."""
    engine, norms = Faulty(policy), find_noisy_norms(policy)
    adapter = {name: layer.lora_B["default"].weight.clone() for name, layer in rollout_layers(policy).items()}
    noise, theirs = NormNoise(norms), find_noisy_norms(engine.policy)
    clean = {name: norm.weight.clone() for name, norm in theirs.items()}

    @torch.no_grad()
    def put(draw):
        key = draw.seed, draw.step, draw.generation
        added = {name: draw.sigma * standard_noise(*key, name, weight.numel()) for name, weight in clean.items()}
        for name, value in (added if fault is None else fault(added)).items():
            theirs[name].weight.copy_(clean[name] + value)

    @contextlib.contextmanager
    def under(draw):
        noise.set(draw)
        with noise.active():
            yield
        noise.clear()

    try:
        return asked(engine, policy).noise(put, under)
    finally:
        noise.remove()
        assert all(torch.equal(theirs[name].weight, clean[name]) for name in clean)
        layers = rollout_layers(policy)
        assert all(torch.equal(layers[name].lora_B["default"].weight, up) for name, up in adapter.items())


NOISE_FAULTS = {
    "lost": lambda noise: {},
    "half of the norms": lambda noise: {n: z for n, z in noise.items() if "input" in n},
    "doubled": lambda noise: {n: 2 * z for n, z in noise.items()},
    "of another draw": lambda noise: {n: z.roll(1) for n, z in noise.items()},
}


def test_right_noise_passes_with_a_margin_and_wrong_noise_is_found(policy):
    result = run_noise(policy)
    assert result.fault is None and result.size in probing.SIGMAS
    assert result.difference < 0.7 * result.limits[1]
    for name, fault in NOISE_FAULTS.items():
        assert "the noise acts otherwise" in run_noise(policy, fault).fault, name


def test_the_rules_separate_healthy_from_faulty_engines_on_record():
    """benchmarks/results/probe_separation.json, judged again by the current rules."""
    engines = json.loads(probe_separation.RESULT.read_text())
    healthy, *faulty = probe_separation.table(engines)
    assert healthy["engines"] >= 12 and healthy["passed"] >= 200 and not healthy["refused"]
    assert healthy["undecided"] <= 0.04 * healthy["passed"]
    at_start = probe_separation.table(engines, lambda record: not record["updates"])[0]["margins"]
    assert min(margin for margin in at_start.values() if margin) >= 2
    assert {row["fault"] for row in faulty} >= {*probe_separation.FAULTS}
    for row in faulty:
        assert row["refused"] >= 49 and row["undecided"] <= 3 and not row["passed"], row["fault"]
        assert min(margin for margin in row["margins"].values() if margin) >= 1.3, row["fault"]
    assert probe_separation.markdown().splitlines()[2] in (ROOT / "docs/source/benchmarks.md").read_text()
