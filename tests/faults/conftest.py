"""Runs, bases and folders that several of these files damage."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from qerl_trl.publish import card, export
from qerl_trl.publish.load import TrainedPolicy
from tests.faults.tiny_runs import EXAMPLE, edit, make_policy
from tests.rollout.workers import worker_over


@pytest.fixture(scope="module")
def finished(tiny_runs, tmp_path_factory) -> Path:
    """A sound run of two steps with a checkpoint of each and its final adapter; read-only."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny_runs.command(folder)
    return folder


@pytest.fixture(scope="session")
def other_base(tiny_model_dir, tmp_path_factory) -> Path:
    """A base of the same shapes with two rows of one matrix exchanged."""
    folder = shutil.copytree(tiny_model_dir("qwen2"), tmp_path_factory.mktemp("bases") / "other")

    def exchange(tensors):
        weight = tensors["model.layers.1.mlp.up_proj.weight"]
        weight[[0, 1]] = weight[[1, 0]].clone()

    edit(folder / "model.safetensors", exchange)
    return folder


@pytest.fixture(scope="session")
def merged(tiny_model_dir, tiny_tokenizer, tmp_path_factory) -> Path:
    """A merged model in several shards; read-only."""
    settings = {"base_format": "nvfp4", "model": "some/base"}
    policy = TrainedPolicy(make_policy(tiny_model_dir("llama"), dtype="bfloat16"), tiny_tokenizer, settings)
    facts = {"kind": "merged", "settings": settings, "dataset": None}
    folder = tmp_path_factory.mktemp("exports") / "merged"
    write = lambda partial, record: card.write(partial, facts, record)  # noqa: E731
    export.save_merged(policy, folder, max_shard_bytes=200_000, card=write)
    return folder


@pytest.fixture(scope="module")
def example():
    """`example(output_dir, **options)`: the example's embedded run of one step, in this process; its results."""
    spec = importlib.util.spec_from_file_location("grpo_gsm8k", EXAMPLE)
    module = sys.modules["grpo_gsm8k"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = {"max_steps": 1, "per_device_train_batch_size": 16, "max_completion_length": 8}
    small |= {"eval_problems": 6, "lora_r": 4}

    def words(given):
        return [str(part) for name, value in given.items() for part in (f"--{name}", value)]

    def run(output_dir, **given):
        recipe = EXAMPLE.parent / "configs" / "embedded.yaml"
        module.main(words({"config": recipe, **small, "output_dir": output_dir, **given}))
        return json.loads((Path(output_dir) / "results.json").read_text())

    run.main, run.small = module.main, words(small)
    yield run
    del sys.modules["grpo_gsm8k"]


@pytest.fixture(scope="module")
def measured(example, tmp_path_factory) -> Path:
    """The folder of such a run; read-only."""
    folder = tmp_path_factory.mktemp("measured") / "run"
    example(folder)
    return folder


@pytest.fixture
def worker(monkeypatch):
    """A worker with an adapter, trained norms and noise."""
    return worker_over(monkeypatch)
