"""benchmarks/: random models in the shapes of real ones, files of several runs, and the tables made of them."""

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
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


#: billions of parameters on each model's card
@pytest.mark.parametrize(
    ("size", "billions"),
    {
        "0.5b": 0.49, "1.5b": 1.54, "3b": 3.09, "7b": 7.61, "14b": 14.77, "32b": 32.76, "llama-3-8b": 8.03, "qwen3-8b": 8.19,
    }.items(),
)  # fmt: skip
def test_a_shape_has_the_parameters_of_its_model(module, size, billions):
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
def test_a_written_model_is_what_its_users_download(module, recipe, tmp_path):
    models, size = module("models"), f"tiny-{recipe}"
    models.write_checkpoint(size, tmp_path / "dense", "cpu")
    config = models.RECIPES[size]
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    model, info = auto.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not any(info.values()), info
    assert type(model.config) is type(NEWER[recipe][0]) and model.config.architectures == [type(model).__name__]
    model.save_pretrained(tmp_path / "again")
    with (
        safe_open(tmp_path / "dense/model.safetensors", "pt") as ours,
        safe_open(tmp_path / "again/model.safetensors", "pt") as theirs,
    ):
        assert set(ours.keys()) == set(theirs.keys())
    text = "Natalia sold 48 clips."
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dense")
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    packed = from_pretrained(tmp_path / "dense", NVFP4Config(), model_class=auto)
    assert torch.isfinite(packed(input_ids=torch.arange(3, 19)[None]).logits).all()


@pytest.mark.parametrize("recipe", FAMILIES)
def test_a_model_written_packed_is_read_packed(module, recipe, tmp_path):
    models = module("models")
    models.write_checkpoint(f"tiny-{recipe}", tmp_path / "packed", "cpu", packed=True)
    config = models.RECIPES[f"tiny-{recipe}"]
    auto = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    model = from_pretrained(tmp_path / "packed", model_class=auto)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, NVFP4Linear)]
    assert layers and not [name for name in layers if "vis" in name]
    assert torch.isfinite(model(input_ids=torch.arange(3, 19)[None]).logits).all()


# --- rollout.py: a file of several runs ---------------------------------------------------------------------------------


def case(**speeds):
    return {"tokens_per_s": {batch.removeprefix("at"): values for batch, values in speeds.items()}, "load_s": 1.0}


def run(commit, device="H200"):
    return {"command": f"measured at {commit}", "commit": commit, "device": device, "versions": {"torch": "2"}}


def test_a_command_line_names_cases(module):
    rollout = module("rollout")
    assert rollout.cases_of(["ours:7b", "stock-lora:7b:512,8"], "8,32") == [
        rollout.Case("ours:7b", (8, 32)),
        rollout.Case("stock-lora:7b", (8, 512)),
    ]
    with pytest.raises(ValueError, match="ours:7b: named more than once"):
        rollout.cases_of(["ours:7b", "ours:7b"])
    with pytest.raises(ValueError, match="'ours' is no case"):
        rollout.cases_of(["ours"])


def test_a_run_adds_to_what_others_measured_and_is_compared_with_itself_alone(module):
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


def test_the_committed_file_says_what_its_cases_say(module):
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


# --- tables -------------------------------------------------------------------------------------------------------------


def test_the_rollout_table_has_a_row_per_model(module, monkeypatch, tmp_path):
    tables, rollout = module("speed_tables"), module("rollout")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "ROLLOUT", tmp_path / "results.json")
    versions = {"torch": "2", "triton": "3", "vllm": "1"}
    first = {"ours:llama-3-8b": case(at8=[20.0], at512=[99.6])}
    first["stock-lora:llama-3-8b"] = case(at8=[10.0]) | {"left_out": {"512": "too large"}}
    record = rollout.added(None, "1", run("a") | {"versions": versions}, first)
    second = {"ours:14b": case(at8=[3.0]), "ours:3b": case(at32=[4.0]) | {"prefill_s": {"64": 0.274}}}
    second["stock-merged:3b"] = case(at32=[8.0]) | {"prefill_s": {"64": 0.16}}
    record = rollout.added(record, "2", run("b", "H100") | {"versions": versions}, second)
    tables.ROLLOUT.write_text(json.dumps(record))
    ours, merged, slots, prefill, note = tables.rollout().split("\n\n")
    assert ours.splitlines()[0] == "| Ours, tokens per second, at | 8 | 32 | 512 sequences |"
    rows = ["| Qwen2.5-3B |  | 4 |  |", "| Qwen2.5-14B | 3 |  |  |", "| Llama-3-8B | 20 |  | 100 |"]
    assert ours.splitlines()[2:] == rows
    assert merged.splitlines()[2:] == ["| Qwen2.5-3B | 0.50 |"] and slots.splitlines()[2:] == ["| Llama-3-8B | 2.00 |"]
    assert prefill.splitlines()[2:] == ["| Qwen2.5-3B | 0.27 | 0.16 |  |"]
    assert "Llama-3-8B: H200, torch 2, triton 3, vLLM 1, commit a." in note and "Qwen2.5-14B, Qwen2.5-3B: H100," in note
    assert "Left out, because too large: stock-lora:llama-3-8b at 512." in note


def test_a_row_of_another_machine_or_a_shared_one_is_marked(module, monkeypatch, tmp_path):
    tables = module("speed_tables")
    record = json.loads(tables.SEVERAL.read_text())
    rows = {row["name"]: row for row in record["multi_gpu"]}
    one, stock = rows["ours-one"], rows["stock-one"]
    monkeypatch.setattr(tables, "SEVERAL", tmp_path / "rows.json")
    monkeypatch.setattr(tables, "measured_by", lambda *_: "there")
    for machine, mark in ((one["machine"], ""), ("another", "*")):
        stock |= {"machine": machine, "beside": "x"}
        tables.SEVERAL.write_text(json.dumps(record))
        page = tables.multi_gpu()
        line = next(line for line in page.splitlines() if line.startswith("| one GPU |"))
        assert line.split("|")[-3].strip() == f"{stock['median']['step']:.2f}{mark}"
        assert "stock-one, beside x" in page


def test_rows_of_other_shapes_have_names_of_their_own(module):
    several = module("several_gpus")
    assert several.row_name("ours-dp", "7b") == "ours-dp"
    assert several.row_name("ours-dp", "70b", 64) == "ours-dp-70b-of-64"
