"""A trainer's exports and pushes, to the stand-in Hub."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from qerl_trl.checkpoint import seal
from qerl_trl.run import publishing
from tests.architectures import dense_model
from tests.faults.tiny_runs import WEIGHTS
from tests.hub_server import REPO, TOKEN
from tests.tiny_models import make_tiny_tokenizer

ADAPTER = {WEIGHTS, "adapter_config.json", "tokenizer.json", "README.md"}


def downloaded(server, folder):
    """The repository's files in `folder`, none of them with the token."""
    for name, data in server.repos[REPO]["files"].items():
        assert TOKEN.encode() not in data, name
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_trainer_pushes_adapter_with_card(server, tiny_runs, tmp_path):
    trainer = tiny_runs.trainer(tmp_path / "run", max_steps=1, save_strategy="no", hub_model_id=REPO, hub_token=TOKEN)
    trainer.train()
    with pytest.raises(ValueError, match="nobody could load"):
        trainer.push_to_hub()
    assert server.requests == []
    trainer.push_to_hub(base_model="someone/base", dataset_name="someone/data")
    files, card = server.repos[REPO]["files"], server.text(REPO)["README.md"]
    assert set(files) >= ADAPTER and "training_args.bin" not in files
    assert json.loads(files[seal.MANIFEST_NAME])["run"]["settings"]["dtype"] == "float32"
    assert not [word for word in ("base_model: someone/base", "someone/data", "qerl") if word not in card]
    assert "model-index" not in card  # nothing was evaluated
    model = AutoModelForCausalLM.from_pretrained(tiny_runs.model, dtype=torch.float32)
    adapter = PeftModel.from_pretrained(model, downloaded(server, tmp_path / "downloaded")).state_dict()
    live = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.default.weight"
    assert torch.equal(adapter[name], live[name])


def test_checkpoints_are_pushed_while_training(server, tiny_runs, tmp_path):
    """`hub_strategy="checkpoint"` uploads the files for a resume in a folder of their own, and nothing else."""
    pushing = {"push_to_hub": True, "hub_model_id": REPO, "hub_token": TOKEN, "hub_always_push": True}
    options = {"hub_base_model": "someone/base", "save_total_limit": 1}
    tiny_runs.trainer(tmp_path / "run", hub_strategy="checkpoint", **options, **pushing).train()
    repo = server.repos[REPO]
    assert repo["private"] is True and len(repo["commits"]) == 2
    assert not list((tmp_path / "run").glob(".push*"))
    folder = downloaded(server, tmp_path / "downloaded")
    root = {name for name in repo["files"] if "/" not in name}
    for name in root:
        assert str(tmp_path).encode() not in repo["files"][name], name
    assert root >= ADAPTER and not root & {"optimizer.pt", "trainer_state.json", "training_args.bin"}
    resumed = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert {path.name for path in (folder / "last-checkpoint").iterdir()} - root == resumed
    for each in (folder, folder / "last-checkpoint"):
        assert seal.problems(each) == []
        assert json.loads((each / "adapter_config.json").read_text())["base_model_name_or_path"] == "someone/base"
    adapters = []
    for number, source in enumerate((folder / "last-checkpoint", tmp_path / "run/checkpoint-2")):
        trainer = tiny_runs.trainer(tmp_path / str(number), max_steps=3, **options)
        trainer.train(resume_from_checkpoint=str(source))
        adapters.append((tmp_path / str(number) / "checkpoint-3" / WEIGHTS).read_bytes())
    assert adapters[0] == adapters[1]


@pytest.mark.parametrize(("name", "warned"), [("qwen3_moe", True), ("qwen3", False)])
def test_a_model_that_cannot_be_merged_is_named_before_training(name, warned, tmp_path, caplog):
    dense_model(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    publishing.warn_of_exports(get_peft_model(model, LoraConfig(target_modules=["q_proj"])), make_tiny_tokenizer())
    assert ("in another form in memory than on disk" in caplog.text) == warned
