"""benchmarks/: random models in the shapes of real ones, and files of several runs."""

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from qerl_nvfp4.tune import MODELS
from qerl_trl.memory.formulas import shape_of
from qerl_trl.nvfp4.config import NVFP4Config, from_pretrained
from qerl_trl.nvfp4.linear import NVFP4Linear
from tests.shapes import NEWER

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: one recipe of each family
FAMILIES = ("qwen3-8b", "llama3.1-8b", "gemma3-12b", "mistral-small-24b", "qwen3.5-9b")


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


# --- random models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "billions"),
    [("0.5b", 0.49), ("7b", 7.61), ("32b", 32.76), ("llama-3-8b", 8.03), ("qwen3-8b", 8.19)],
)
def test_a_shape_has_as_many_parameters_as_its_models_card(module, size, billions):
    models = module("models")
    shape = shape_of(models.folder(size))
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.011)
    assert set(shape.linears) == set(models.linear_shapes(size).values())
    assert models.kv_bytes(size) == 2 * 2 * shape.layers * shape.kv_width
    assert shape.head_norms == (size == "qwen3-8b")


@pytest.mark.parametrize("name", MODELS)
def test_the_tuned_matrices_are_those_of_the_shape(module, name):
    projections = module("models").linear_shapes(name.lower())
    (q, hidden), (kv, _), (inner, _) = (projections[f"{n}_proj"] for n in ("self_attn.q", "self_attn.k", "mlp.gate"))
    assert (hidden, q, kv, inner) == MODELS[name]


@pytest.mark.parametrize("size", ["7b", "llama-3-8b", "qwen3-8b"])
def test_trainer_and_engines_build_from_one_configuration(module, monkeypatch, tmp_path, size):
    """Also where heads are wider together than the hidden states."""
    models = module("models")
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
    small |= {"head_dim": 32} if "head_dim" in models.CONFIGS[size] else {}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(models.CONFIGS, size, models.CONFIGS[size] | small)
    model = models.packed_model(size, "cpu")
    of_engines = AutoConfig.from_pretrained(model.name_or_path)
    assert type(model.config) is type(of_engines) and model.config.rope_parameters == of_engines.rope_parameters
    differ = {k for k, v in of_engines.to_dict().items() if model.config.to_dict().get(k) != v}
    assert differ <= {"_name_or_path", "architectures", "dtype"}, differ
    packed = {name for name, layer in model.named_modules() if isinstance(layer, NVFP4Linear)}
    assert {name.split(".", 3)[3] for name in packed} == models.linear_shapes(size).keys()
    for name, (n, k) in models.linear_shapes(size).items():
        layer = model.get_submodule(f"model.layers.1.{name}")
        assert (layer.out_features, layer.in_features) == (n, k)
        assert (layer.bias is not None) == (size == "7b" and name.split(".")[1][0] in "qkv")
    assert torch.isfinite(model(input_ids=torch.arange(8)[None]).logits).all()


@pytest.mark.parametrize("recipe", FAMILIES)
def test_a_written_model_has_the_format_of_the_hub(module, recipe, tmp_path):
    models, size = module("models"), f"tiny-{recipe}"
    models.write_checkpoint(size, tmp_path / "dense", "cpu")
    config = models.RECIPES[size]
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    model, info = auto.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not any(info.values()), info
    assert type(model.config) is type(NEWER[recipe][0]) and model.config.architectures == [type(model).__name__]
    model.save_pretrained(tmp_path / "again")
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("dense", "again")]
    assert names[0] == names[1]
    text = "Natalia sold 48 clips."
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    models.write_checkpoint(size, tmp_path / "packed", "cpu", packed=True)
    for quantized in (
        from_pretrained(tmp_path / "dense", NVFP4Config(), model_class=auto),
        from_pretrained(tmp_path / "packed", model_class=auto),
    ):
        layers = [name for name, layer in quantized.named_modules() if isinstance(layer, NVFP4Linear)]
        assert layers and not [name for name in layers if "vis" in name]
        assert torch.isfinite(quantized(input_ids=torch.arange(3, 19)[None]).logits).all()


# --- rollout.py: a file of several runs ---------------------------------------------------------------------------------


def case(**speeds):
    return {"tokens_per_s": {batch.removeprefix("at"): values for batch, values in speeds.items()}, "load_s": 1.0}


def run(commit, device="H200"):
    return {"command": f"measured at {commit}", "commit": commit, "device": device, "versions": {"torch": "2"}}


def test_a_run_is_added_to_a_file_and_compared_with_itself_only(module):
    added = module("rollout").added
    first = added(None, "1", run("a"), {"ours:7b": case(at8=[10.0, 30.0]), "stock-merged:7b": case(at8=[10.0])})
    both = added(first, "2", run("b"), {"ours:3b": case(at8=[5.0]), "stock-lora:3b": case(at8=[2.0], at32=[9.0])})
    assert both["runs"] == {"1": run("a"), "2": run("b")} and both["tokens_per_s"]["ours:7b"] == {"8": 20.0}
    assert both["ratios"] == {"ours:7b over stock-merged:7b": {"8": 2.0}, "ours:3b over stock-lora:3b": {"8": 2.5}}
    assert added(both, "2", run("b"), {}) == both
    again = added(both, "3", run("c", "H100"), {"ours:7b": case(at8=[30.0]), "stock-lora:7b": case(at8=[15.0])})
    assert again["tokens_per_s"]["ours:7b"] == {"8": 30.0} and list(again["runs"]) == ["1", "2", "3"]
    assert again["ratios"] == {"ours:3b over stock-lora:3b": {"8": 2.5}, "ours:7b over stock-lora:7b": {"8": 2.0}}
    whole = added(again, "4", run("d"), {"stock-merged:7b": case(at8=[1.0])})
    assert list(whole["runs"]) == ["2", "3", "4"] and whole["ratios"] == again["ratios"]


def test_the_committed_file_is_consistent(module):
    rollout = module("rollout")
    record = json.loads((BENCHMARKS / "results/rollout_h200.json").read_text())
    last = list(record["runs"])[-1]
    assert rollout.added(record, last, record["runs"][last], {}) == record


def test_a_case_that_fails_is_recorded_and_a_run_of_failures_leaves_the_file(module, monkeypatch, tmp_path):
    rollout, give = module("rollout"), 'print("RESULT {\\"tokens_per_s\\": {\\"8\\": [2.0]}}")'
    options = argparse.Namespace(out=tmp_path / "out.json", commit="a" * 40, timeout=60, repeats=1, step_tokens=4096)
    real = module("common").results_of

    def stand_in(waiting, start, **limits):
        def script(name):
            return [sys.executable, "-c", give if name.startswith("ours") else "raise ValueError(5)"], {}

        return real(waiting, script, **limits)

    monkeypatch.setattr(rollout.common, "results_of", stand_in)
    with pytest.raises(SystemExit, match="Nothing was measured"):
        rollout.measure(rollout.cases_of(["stock-lora:7b"]), options)
    assert not options.out.exists()
    rollout.measure(rollout.cases_of(["ours:7b", "stock-lora:7b"]), options)
    record = json.loads(options.out.read_text())
    assert record["tokens_per_s"] == {"ours:7b": {"8": 2.0}}
    (measured,) = record["runs"].values()
    assert measured["commit"] == "a" * 40 and measured["failed"] == {"stock-lora:7b": ["ValueError: 5"]}
