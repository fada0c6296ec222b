"""Gated delta nets as they are planned: against what autograd saves, what transformers caches, and vLLM's own sums."""

import copy
import dataclasses
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers.cache_utils import DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.checks import environment
from qerl_trl.memory import formulas
from qerl_trl.memory.plan import Gpu, plan_run
from qerl_trl.memory.workload import Workload, workload_of_file
from tests.architectures import dense_model
from tests.shapes import NEWER, SEVEN_B

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
NINE_B = NEWER["qwen3.5-9b"][0]


@pytest.mark.parametrize(("key", "value", "heads"), [(128, 128, 32), (64, 128, 32), (128, 64, 32), (128, 128, 48)])
def test_activations_are_what_autograd_saves_at_full_width(key, value, heads):
    """transformers' own code on the meta device, bytes per token of one delta net with frozen projections."""
    config = copy.deepcopy(NINE_B.text_config)
    config.linear_key_head_dim, config.linear_value_head_dim, config.linear_num_value_heads = key, value, heads
    with torch.device("meta"):
        net = Qwen3_5GatedDeltaNet(config, 0).to(torch.bfloat16).requires_grad_(False)
        hidden = torch.empty(2, 512, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.ones(2, 512, dtype=torch.bool)
    own = {tensor.untyped_storage()._cdata for tensor in (hidden, *net.parameters())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        net(hidden, attention_mask=mask)
    measured = sum(storage.nbytes() for storage in saved.values()) / 1024
    nets = formulas.DeltaNets.of(config)
    assert nets.activation_bytes(kernels=False) == pytest.approx(measured, rel=0.005)
    assert nets.activation_bytes(kernels=True) < measured / 2


def test_a_layer_is_planned_with_its_delta_net():
    """It was planned as if it attended: 5 GiB too little for the recipe's 4 sequences."""
    shape = formulas.shape_of(NINE_B)
    work = Workload(batch=4, prompt_length=123, completion_length=4096, fused=True)
    slow = formulas.layer_activation_bytes(shape, work)
    fast = formulas.layer_activation_bytes(shape, dataclasses.replace(work, delta_kernels=True))
    attending = formulas.layer_activation_bytes(dataclasses.replace(shape, delta_nets=None), work)
    assert (slow - fast) / work.tokens == 32 * (28 * 128 + 10 * 128 + 18 * 64 + 128 * 128 // 16 + 15)
    assert attending < fast < slow and slow - attending > 4 * 2**30


def test_the_cache_of_generate_is_a_filled_one():
    model = dense_model("qwen3_5_text")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.ones(3, 20, dtype=torch.long), past_key_values=cache)
    held = 0
    for layer in cache.layers:
        for name in ("keys", "values", "conv_states", "recurrent_states"):
            found = getattr(layer, name, None)
            tensors = found.values() if isinstance(found, dict) else found if isinstance(found, list) else [found]
            held += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
    assert formulas.kv_bytes(formulas.shape_of(model.config), 3, 20) == held


def test_the_engines_cache_has_pages_for_attention_and_one_state_per_group():
    """vLLM on Qwen3.5-9B: states of 2,146,304 bytes make its blocks 528 tokens long; 8 layers attend, 3 groups of 8 carry states."""
    shape, work = formulas.shape_of(NINE_B), Workload(prompt_length=123, completion_length=4096)
    block = 8 * 528 * 4096
    assert shape.attending == 8
    assert formulas.engine_kv_bytes(shape, work, 0) == block
    assert formulas.engine_kv_bytes(shape, work, 5) == (5 * (3 + 8) + 1) * block
    whole = formulas.engine_kv_bytes(dataclasses.replace(shape, delta_nets=None), work, 5)
    assert whole > 2.8 * formulas.engine_kv_bytes(shape, work, 5), "it was planned as if all 32 layers attended"
    assert formulas.DeltaNets.of(SEVEN_B) is None


def test_an_engine_is_told_of_no_more_sequences_than_it_has_states_for():
    """vLLM refuses CUDA graphs of more: "max_num_seqs (128) exceeds available Mamba cache blocks (45)"."""
    shape, config = formulas.shape_of(NINE_B), CONFIGS / "qwen3.5-9b.yaml"
    work = workload_of_file(config, 123)[1]
    block = formulas.engine_kv_bytes(shape, work, 0)
    tight = plan_run(shape, dataclasses.replace(work, kv_limit=45 * block), Gpu.of_gib(80))
    assert (tight.sequences, tight.engine_arguments()["max_num_seqs"]) == (4, 11)
    assert "max_num_seqs" not in plan_run(shape, work, Gpu.of_gib(141)).engine_arguments()
    assert plan_run(formulas.shape_of(SEVEN_B), work, Gpu.of_gib(80)).most_running is None


def test_the_plan_says_what_it_assumes_of_updates():
    shape, work = formulas.shape_of(NINE_B), Workload(batch=4)
    slow, fast = (plan_run(shape, dataclasses.replace(work, delta_kernels=kernels)) for kernels in (False, True))
    assert "without flash-linear-attention" in slow.table() and "flash" not in fast.table()
    assert slow.update > fast.update


@pytest.mark.parametrize(
    ("installed", "capability", "triton", "tilelang", "remedy"),
    [
        (False, (9, 0), "3.6.0", False, "pip install 'flash-linear-attention[tilelang]'"),
        (False, (9, 0), "3.7.1", False, "pip install flash-linear-attention"),
        (False, (12, 0), "3.6.0", False, "pip install flash-linear-attention"),
        (True, (9, 0), "3.6.0", False, "pip install tilelang"),
        (True, (9, 0), "3.6.0", True, None),
        (True, (8, 0), "3.6.0", False, None),
    ],
)
def test_what_computes_them_is_asked_at_the_start(monkeypatch, installed, capability, triton, tilelang, remedy):
    """The first update on an H200 did not end in two minutes, after three minutes of start. transformers says it during that update."""
    versions = importlib.metadata.version
    monkeypatch.setattr(environment, "is_flash_linear_attention_available", lambda: installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: triton if name == "triton" else versions(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: tilelang or None)
    found = environment.delta_nets()
    assert [problem.remedy.startswith(remedy) for problem in found] == ([True] if remedy else [])
    assert [problem.fatal for problem in found] == ([installed] if remedy else [])


def test_a_trainer_asks_where_its_model_has_them(monkeypatch, tmp_path, tiny_tokenizer):
    asked = []
    monkeypatch.setattr(environment, "delta_nets", lambda: asked.append(1) or [])
    for name in ("llama", "qwen3_5_text"):
        assert not asked
        dense_model(name).save_pretrained(tmp_path / name)
        args = QeRLConfig(str(tmp_path / "run"), use_cpu=True, bf16=False, report_to="none", num_generations=2,
            per_device_train_batch_size=2, aqn=False, max_completion_length=8)  # fmt: skip
        trainer = QeRLGRPOTrainer(
            str(tmp_path / name), lambda completions, **_: [0.0] * len(completions), args,
            Dataset.from_dict({"prompt": ["a", "b"]}), processing_class=tiny_tokenizer,
        )  # fmt: skip
        assert trainer.memory_plan.work.delta_kernels is False
    assert asked == [1]
