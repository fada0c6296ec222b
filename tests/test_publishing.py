"""A trainer's exports and pushes, against the stand-in Hub."""

import json
import pickle

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from qerl_trl import QeRLGRPOTrainer, QeRLRLOOTrainer
from qerl_trl.checkpoint import seal
from qerl_trl.publish import card as cards
from qerl_trl.publish import hub
from qerl_trl.publish.load import recorded_settings
from qerl_trl.run import publishing
from tests.architectures import dense_model
from tests.hub_server import TOKEN
from tests.publish.test_hub import REPO, no_token_anywhere  # noqa: F401  (a fixture)
from tests.tiny_models import make_tiny_tokenizer
from tests.trainers import PROMPTS, settings, spread_reward


def make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path, trainer_class=QeRLGRPOTrainer, **kwargs):
    return trainer_class(
        model=str(tiny_model_dir("qwen2")),
        reward_funcs=spread_reward,
        args=settings(tmp_path, trainer_class._config_class, **kwargs),
        train_dataset=PROMPTS,
        processing_class=tiny_tokenizer,
    )


def test_trainer_pushes_adapter_with_card(server, tiny_model_dir, tiny_tokenizer, tmp_path):
    trainer = make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path, hub_model_id=REPO, hub_token=TOKEN)
    trainer.train()
    with pytest.raises(ValueError, match="nobody could load"):
        trainer.push_to_hub()
    assert server.requests == []
    trainer.push_to_hub(base_model="someone/base", dataset_name="someone/data")
    files = server.repos[REPO]["files"]
    assert server.repos[REPO]["private"] is True
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= set(files)
    run = json.loads(files[seal.MANIFEST_NAME])["run"]
    assert run["settings"]["dtype"] == "float32"
    assert "training_args.bin" not in files
    card = server.text(REPO)["README.md"]
    assert "base_model: someone/base" in card
    assert "someone/data" in card
    assert "qerl" in card
    assert "model-index" not in card  # nothing was evaluated
    for name, data in files.items():
        assert TOKEN.encode() not in data, name
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), dtype=torch.float32)
    adapter = PeftModel.from_pretrained(model, folder).state_dict()
    live = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    assert torch.equal(
        adapter["base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight"],
        live["base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight"],
    )


@pytest.mark.parametrize("private", [True, False])
def test_what_a_push_says_of_privacy(server, tiny_model_dir, tiny_tokenizer, tmp_path, private):
    """Goes before what the arguments say."""
    options = {"hub_model_id": REPO, "hub_token": TOKEN, "hub_private_repo": not private}
    make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path, **options).push_to_hub(
        base_model="someone/base", private=private
    )
    assert server.repos[REPO]["private"] is private


def test_an_rloo_run_is_published_as_one(server, tiny_model_dir, tiny_tokenizer, tmp_path):
    """From the live trainer, and from its checkpoint's files alone."""
    options = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    trainer = make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path, QeRLRLOOTrainer, **options)
    trainer.train()
    hub.push_adapter(trainer, "tester/adapter", base_model="someone/base")
    checkpoint_folder = tmp_path / "run" / "checkpoint-2"
    from_files = cards.facts_of_run(checkpoint_folder, recorded_settings(checkpoint_folder))
    texts = [server.text("tester/adapter")["README.md"]]
    for text in [*texts, cards.render(from_files)]:
        assert "grpo" not in text.lower()
        assert "RLOO" in text
        for word in ("math word problems", "gsm8k", "correctness"):
            assert word not in text.lower()
    assert "rewards/spread_reward/mean" in texts[0]


def test_checkpoints_are_pushed_while_training(server, tiny_model_dir, tiny_tokenizer, tmp_path):
    """`hub_strategy="checkpoint"`: what a resumed run reads goes up, in a folder of its own, and nothing else does."""
    options = {"save_strategy": "steps", "save_steps": 1, "hub_base_model": "someone/base", "save_total_limit": 1}
    pushing = {"push_to_hub": True, "hub_model_id": REPO, "hub_token": TOKEN, "hub_always_push": True}
    make_trainer(
        tiny_model_dir, tiny_tokenizer, tmp_path, max_steps=2, hub_strategy="checkpoint", **options, **pushing
    ).train()
    repo = server.repos[REPO]
    assert repo["private"] is True
    assert len(repo["commits"]) == 2
    assert not list((tmp_path / "run").glob(".push*"))
    downloaded = tmp_path / "downloaded"
    for name, data in repo["files"].items():
        assert TOKEN.encode() not in data, name
        assert str(tmp_path).encode() not in data or name.startswith("last-checkpoint/"), name
        (downloaded / name).parent.mkdir(parents=True, exist_ok=True)
        (downloaded / name).write_bytes(data)
    root = {name for name in repo["files"] if "/" not in name}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= root
    assert {path.name for path in (downloaded / "last-checkpoint").iterdir()} - root == {
        *("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
    }
    assert "training_args.bin" not in root and not root & {"optimizer.pt", "trainer_state.json"}
    assert seal.problems(downloaded) == seal.problems(downloaded / "last-checkpoint") == []
    for folder in (downloaded, downloaded / "last-checkpoint"):
        assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "someone/base"
    adapters = []
    for source in (downloaded / "last-checkpoint", tmp_path / "run/checkpoint-2"):
        trainer = make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path / source.name, max_steps=3, **options)
        trainer.train(resume_from_checkpoint=str(source))
        adapters.append((tmp_path / source.name / "run/checkpoint-3/adapter_model.safetensors").read_bytes())
    assert adapters[0] == adapters[1]


def test_arguments_do_not_pickle_the_token(tmp_path):
    args = settings(tmp_path, hub_token=TOKEN)
    assert args.hub_token == TOKEN
    assert TOKEN.encode() not in pickle.dumps(args)
    assert TOKEN not in args.to_json_string() + repr(args)


@pytest.mark.parametrize(("name", "told"), [("qwen3_moe", True), ("qwen3", False)])
def test_what_cannot_be_merged_is_said_before_anything_is_trained(name, told, tmp_path, caplog):
    dense_model(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    publishing.warn_of_exports(get_peft_model(model, LoraConfig(target_modules=["q_proj"])), make_tiny_tokenizer())
    assert ("in another form in memory than on disk" in caplog.text) == told
