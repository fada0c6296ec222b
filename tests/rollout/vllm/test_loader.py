"""The engine's loader: dense layers in one storage, and transformers' names of vLLM's layers."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.model_executor.models.utils import WeightsMapper

from qerl_trl.rollout.vllm import loader
from qerl_trl.rollout.vllm.loader import Renaming, fuse_dense_rows, fused_rows, with_gap


def test_dense_layers_get_one_storage():
    layers = [nn.Linear(8, rows, bias=False) for rows in (6, 2, 2)]
    before = torch.cat([layer.weight.detach().clone() for layer in layers])
    fuse_dense_rows(layers)
    assert torch.equal(fused_rows([layer.weight.data for layer in layers], ["q", "k", "v"]), before)


def test_a_layer_that_the_trainer_does_not_have_is_refused(monkeypatch):
    config = SimpleNamespace(model_config=SimpleNamespace(architecture="OfVLLM"))
    monkeypatch.setattr(loader, "get_current_vllm_config", lambda: config)
    published = loader.Published(nn.Sequential(nn.Linear(8, 8)), alias=False)
    with pytest.raises(
        ValueError, match=r"a layer 'model\.up' that the trainer's Sequential does not have.*use_vllm=False"
    ):
        published.module("model.up")
    with pytest.raises(ValueError, match=r"vLLM's OfVLLM has a layer '' .*use_vllm=False"):
        published.module("")


# --- names ---

#: rules of a vLLM class
VISION = {"model.language_model.": "language_model.model.", "model.visual.": "visual."}
VISION |= {"lm_head.": "language_model.lm_head.", "model.": "language_model.model."}
UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("rules", "name", "expected"),
    [
        ({"prefix": VISION}, f"language_model.{UP}", "model.language_model.layers.0.mlp.up_proj"),
        ({"prefix": VISION}, "language_model.lm_head", "lm_head"),
        ({"substr": {"A_log": "A", "mamba": "mamba.mamba"}}, "0.mamba.mamba.in_proj", "0.mamba.in_proj"),
        ({"suffix": {".router.gate.weight": ".gate.weight"}}, "0.mlp.gate", "0.mlp.router.gate"),
    ],
)
def test_a_name_is_turned_back(rules, name, expected):
    renaming = Renaming()
    renaming.add(WeightsMapper(**{f"orig_to_new_{kind}": rule for kind, rule in rules.items()}))
    assert renaming.original(name) == expected
    with pytest.raises(ValueError, match=r"its layer 'model\.layers\.0\.proj' in a way that cannot be turned back"):
        renaming.add(WeightsMapper(orig_to_new_substr={"layers": "blocks.layers"}))
        renaming.original("model.layers.0.proj")


def test_known_names_decide_between_spellings_and_fill_gaps():
    renaming = Renaming()
    renaming.add(WeightsMapper(orig_to_new_prefix={"model.language_model.": "model."}))
    assert renaming.original(UP) == UP
    for known in (UP, "model.language_model.layers.0.mlp.up_proj"):
        assert renaming.original(UP, {known}) == known
    known = {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}
    assert with_gap("model.layers.0.q_proj", known) == "model.layers.0.self_attn.q_proj"
    assert with_gap("model.q_proj", known) == "model.q_proj", "either could be meant"
