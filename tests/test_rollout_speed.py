"""benchmarks/rollout.py and models.py: the models' shapes, whose turn it is, and what a file of several runs says; engines need a GPU to be measured."""

import argparse
import contextlib
import importlib
import json
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from qerl_nvfp4.tune import MODELS
from qerl_trl.memory.formulas import shape_of
from qerl_trl.nvfp4.linear import NVFP4Linear

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
COMMITTED = BENCHMARKS / "results/rollout_speed_h200.json"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


# --- shapes


#: billions of parameters that each model's card gives
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
    """With heads that are not as wide together as the hidden states where the model says their width."""
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


# --- stages and turns


def test_a_command_line_names_stages(module):
    plan = module("rollout")
    stages = plan.stages_of(["ours:7b", "stock-lora:7b:8", "then", "ours:llama-3-8b:512,8"], "8,32")
    assert stages == [
        [plan.Case("ours:7b", (8, 32)), plan.Case("stock-lora:7b", (8,))],
        [plan.Case("ours:llama-3-8b", (8, 512))],
    ]
    with pytest.raises(ValueError, match="ours:7b: named more than once"):
        plan.stages_of(["ours:7b", "then", "ours:7b"])
    with pytest.raises(ValueError, match="'ours' is no case"):
        plan.stages_of(["ours"])


def test_every_engine_of_a_model_begins_as_often_as_the_others(module):
    plan = module("rollout")
    batches = (8, 32, 64, 128, 256, 512)
    names = ["ours:7b", "stock-merged:7b", "stock-lora:7b"]
    order = plan.turns([*(plan.Case(name, batches) for name in names), plan.Case("ours:3b", (8,))])
    assert [batch for _, batch in order[:-1]] == [batch for batch in batches for _ in names]
    for place in range(3):
        assert sorted(name for name, _ in order[place:-1:3]) == sorted(2 * names)
    assert order[-1] == ("ours:3b", 8)


# --- the file


def case(**speeds):
    return {"tokens_per_s": {batch.removeprefix("at"): values for batch, values in speeds.items()}, "load_s": 1.0}


def run(commit, device="H200"):
    return {"command": f"measured at {commit}", "commit": commit, "device": device, "versions": {"torch": "2"}}


def test_a_run_adds_to_what_others_measured(module):
    results = module("rollout")
    first = results.added(None, "1", run("a"), {"ours:7b": case(at8=[10.0, 30.0]), "stock-merged:7b": case(at8=[10.0])})
    both = results.added(
        first, "2", run("b"), {"ours:3b": case(at8=[5.0]), "stock-lora:3b": case(at8=[2.0], at32=[9.0])}
    )
    assert both["runs"] == {"1": run("a"), "2": run("b")}
    assert {name: found["run"] for name, found in both["cases"].items()} == {
        "ours:7b": "1", "stock-merged:7b": "1", "ours:3b": "2", "stock-lora:3b": "2",
    }  # fmt: skip
    assert both["tokens_per_s"]["ours:7b"] == {"8": 20.0}
    assert both["ratios"] == {"ours:7b over stock-merged:7b": {"8": 2.0}, "ours:3b over stock-lora:3b": {"8": 2.5}}
    assert results.added(both, "2", run("b"), {}) == both


def test_a_case_measured_again_replaces_the_old_one_and_is_compared_with_nothing_of_another_run(module):
    results = module("rollout")
    names = ("ours:7b", "stock-merged:7b", "stock-lora:7b")
    first = results.added(None, "1", run("a"), {name: case(at8=[10.0], at32=[20.0]) for name in names})
    again = results.added(first, "2", run("a"), {"ours:7b": case(at8=[30.0]), "stock-lora:7b": case(at8=[15.0])})
    assert again["tokens_per_s"]["ours:7b"] == {"8": 30.0}
    assert again["ratios"] == {"ours:7b over stock-lora:7b": {"8": 2.0}}
    assert list(again["runs"]) == ["1", "2"]
    whole = results.added(again, "3", run("c", "H100"), {"stock-merged:7b": case(at8=[1.0])})
    assert list(whole["runs"]) == ["2", "3"] and whole["ratios"] == again["ratios"]


def test_the_committed_file_says_what_its_cases_say(module):
    results = module("rollout")
    record = json.loads(COMMITTED.read_text())
    last = list(record["runs"])[-1]
    assert results.added(record, last, record["runs"][last], {}) == record
    assert all(
        {"command", "commit", "device", "versions", "order"} <= found.keys() for found in record["runs"].values()
    )


#: a case's process without an engine: at `stock-lora` it ends while it measures 32 sequences
STAND_IN = """
import json, os, pathlib, socket, sys
case, folder = sys.argv[1], pathlib.Path(sys.argv[2])
result = {"case": case, "tokens_per_s": {}, "left_out": {}}
port = os.environ["MASTER_PORT"]
(folder / f"{case}.port").write_text(port)
held = socket.create_server(("127.0.0.1", int(port)))
if case.startswith("ours-slots"):
    sys.exit(4)
print("RESULT " + json.dumps(result), flush=True)
for turn in map(str.strip, sys.stdin):
    if turn.isdigit():
        if case.startswith("stock-lora") and turn == "32":
            sys.exit(3)
        with open(folder / "order", "a") as file:
            file.write(f"{case} {turn}\\n")
        result["tokens_per_s"][turn] = [float(turn)]
    print("a line of vLLM's\\nRESULT " + json.dumps(result), flush=True)
    if turn == "last":
        break
"""


@pytest.fixture
def speed(module, monkeypatch, tmp_path):
    monkeypatch.setattr(
        module("rollout"), "command", lambda case, options: [sys.executable, "-c", STAND_IN, case.name, str(tmp_path)]
    )
    return module("rollout")


def test_a_run_measures_in_turns_and_keeps_what_an_engine_did_before_it_failed(speed, tmp_path, capfd):
    options = argparse.Namespace(out=tmp_path / "out.json", commit="a" * 40, timeout=60)
    speed.measure([[speed.Case("ours:7b", (8,))]], options)
    (tmp_path / "order").unlink()
    stages = speed.stages_of(["ours:3b", "stock-merged:3b", "then", "stock-lora:3b", "ours-slots:3b"], "8,32,64")
    speed.measure(stages, options)
    assert (tmp_path / "order").read_text().splitlines() == [
        "ours:3b 8", "stock-merged:3b 8", "stock-merged:3b 32", "ours:3b 32", "ours:3b 64", "stock-merged:3b 64", "stock-lora:3b 8",
    ]  # fmt: skip
    record = json.loads(options.out.read_text())
    assert list(record["cases"]) == ["ours:7b", "ours:3b", "stock-merged:3b", "stock-lora:3b"]
    assert record["ratios"]["ours:3b over stock-merged:3b"] == {"8": 1.0, "32": 1.0, "64": 1.0}
    assert record["ratios"]["ours:3b over stock-lora:3b"] == {"8": 1.0}
    why = "its process ended with 3 in its turn `32`"
    assert record["cases"]["stock-lora:3b"]["left_out"] == {"32": why, "64": why}
    assert list(record["runs"].values())[-1]["failed"] == {
        "ours-slots:3b": "its process ended with 4 in its turn `import`"
    }
    assert [record["cases"][name]["stage"] for name in ("ours:3b", "stock-lora:3b")] == [0, 1]
    assert all(found["commit"] == "a" * 40 for found in record["runs"].values())
    assert f"CASE stock-lora:3b FAILED: {why}" in capfd.readouterr().out


def test_a_run_beside_others_takes_ports_that_nobody_listens_on(speed, module, monkeypatch, tmp_path):
    """Two runs on two GPUs of a machine took the same ones, and an engine of one was lost."""
    monkeypatch.setenv("MASTER_PORT", "0")
    ports = module("common").free_ports(8)
    assert len(set(ports)) == 8
    with contextlib.ExitStack() as held:
        for port in ports:
            held.enter_context(socket.create_server(("127.0.0.1", port)))
        assert not set(ports) & set(module("common").free_ports(8))
        options = argparse.Namespace(out=tmp_path / "out.json", commit="a" * 40, timeout=60)
        cases = [speed.Case(f"{name}:7b", (8,)) for name in ("ours", "stock-merged", "stock-lora")]
        speed.measure([cases], options)
    given = {int((tmp_path / f"{case.name}.port").read_text()) for case in cases}
    assert len(given) == len(cases) and not given & {0, *ports}, "each process has a free one of its own"
    record = json.loads((tmp_path / "out.json").read_text())
    assert list(record["cases"]) == [case.name for case in cases] and not next(iter(record["runs"].values()))["failed"]


def test_a_run_in_which_every_engine_fails_leaves_the_file_as_it_was(module, monkeypatch, tmp_path):
    speed = module("rollout")
    monkeypatch.setattr(speed, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    options = argparse.Namespace(out=tmp_path / "out.json", commit="", timeout=60)
    with pytest.raises(SystemExit, match="Nothing was measured"):
        speed.measure([[speed.Case("ours:7b", (8,))]], options)
    assert not options.out.exists()


def test_the_table_has_a_row_per_model_that_was_measured(module, monkeypatch, tmp_path):
    results, tables = module("rollout"), module("rollout_tables")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    versions = {"torch": "2", "triton": "3", "vllm": "1"}
    known = {
        name: {**run(name, device), "order": "in turns", "versions": versions}
        for name, device in (("a", "H200"), ("b", "H100"))
    }
    ours = case(at8=[20.0], at512=[99.6]) | {"stage": 0}
    record = results.added(
        None,
        "1",
        known["a"],
        {
            "ours:llama-3-8b": ours,
            "stock-lora:llama-3-8b": case(at8=[10.0]) | {"stage": 1, "left_out": {"512": "too large"}},
        },
    )
    record = results.added(
        record,
        "2",
        known["b"],
        {
            "ours:14b": case(at8=[3.0]),
            "ours:3b": case(at32=[4.0]) | {"prefill_s": {"64": 0.274}, "step_tokens": 16384},
            "stock-merged:3b": case(at32=[8.0]) | {"prefill_s": {"64": 0.16}, "step_tokens": 4096},
        },
    )
    path = tmp_path / "results.json"
    path.write_text(json.dumps(record))
    first, merged, slots, prefill, note = tables.rollout(path).split("\n\n")
    assert first.splitlines()[0] == "| Ours, tokens per second, at | 8 | 32 | 512 sequences |"
    assert first.splitlines()[2:] == [
        "| Qwen2.5-3B |  | 4 |  |", "| Qwen2.5-14B | 3 |  |  |", "| Llama-3-8B | 20 |  | 100 |"
    ]  # fmt: skip
    assert merged.splitlines()[2:] == ["| Qwen2.5-3B | 0.50 |"]
    assert (
        prefill.splitlines()[0]
        == "| Prefill of 64 x 256 tokens, s | ours | merged bf16 | bf16 with vLLM's LoRA slots |"
    )
    assert prefill.splitlines()[2:] == ["| Qwen2.5-3B | 0.27 | 0.16 |  |"]
    assert slots.splitlines()[2:] == ["| Llama-3-8B | 2.00 |"]
    assert "Llama-3-8B: H200, torch 2, triton 3, vLLM 1, commit a, in turns." in note
    assert "Qwen2.5-14B, Qwen2.5-3B: H100," in note and "Qwen2.5-7B" not in note
    assert "Built when other engines of the model had ended: stock-lora:llama-3-8b." in note
    steps = "A step of ours may process 16384 tokens, of the others 4096, which is TRL's: Qwen2.5-3B."
    assert steps in note and note.count("A step of ours") == 1
    assert "Left out, because too large: stock-lora:llama-3-8b at 512." in note


def test_what_was_wanted_of_rollouts_is_read_from_the_record(module, monkeypatch, tmp_path):
    tables = module("rollout_tables")
    ratios = {"ours:7b over stock-merged:7b": {"8": 1.6, "64": 1.249, "128": 1.05, "256": 0.9}}
    ratios["ours:32b over stock-lora:32b"] = {"8": 2.4, "64": 1.5996, "128": 1.46}
    monkeypatch.setattr(tables, "ROLLOUT", tmp_path / "record.json")
    tables.ROLLOUT.write_text(json.dumps({"ratios": ratios}))
    said = tables.wanted()
    assert (
        "1.600 at 8 (1.6: reached), 1.249 at 64 (1.25: missed), 1.050 at 128 (1.05: reached), 0.900 at 256 (1: missed)"
        in said
    )
    assert "2.400 at 8 (2.4: reached), 1.600 at 64 (1.6: missed)" in said
