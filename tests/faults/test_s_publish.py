"""Faults of publishing that once passed silently; the product is the repository on the stand-in Hub."""

import json

import pytest
from transformers import Trainer

from qerl_trl import QeRLGRPOTrainer, checkpoint
from tests.faults.catalog import fault
from tests.hub_server import TOKEN
from tests.publish.test_hub import REPO, no_token_anywhere, server  # noqa: F401  (fixtures)
from tests.test_trainer import PROMPTS, settings, spread_reward

SECRET = "kx93-vv02-a-token-of-no-known-form"


def run(tiny_model_dir, tiny_tokenizer, tmp_path, **options):
    """A trainer, one small step from its end."""
    initial = {"dtype": "float32", "token": SECRET}
    return QeRLGRPOTrainer(
        model=str(tiny_model_dir("qwen2")),
        reward_funcs=spread_reward,
        args=settings(
            tmp_path, max_steps=1, hub_model_id=REPO, hub_token=TOKEN, model_init_kwargs=initial, aqn=False, **options
        ),
        train_dataset=PROMPTS,
        processing_class=tiny_tokenizer,
    )


def published(server, repo=REPO):  # noqa: F811
    files = server.repos[repo]["files"]
    for name, data in files.items():
        assert TOKEN.encode() not in data, name
        assert SECRET.encode() not in data, name
    return files


@fault("S.token_in_uploads", recovered=True)
def test_a_fully_trained_model_is_published_without_its_arguments(
    server,  # noqa: F811
    tiny_model_dir,
    tiny_tokenizer,
    tmp_path,
    monkeypatch,
):
    """transformers would upload the whole output folder: arguments, logs, whatever lies there."""
    monkeypatch.setattr(Trainer, "push_to_hub", None)
    trainer = run(tiny_model_dir, tiny_tokenizer, tmp_path, base_format="full")
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "notes.txt").write_text(TOKEN)
    trainer.push_to_hub(dataset_name="someone/data")
    files = published(server)
    assert (tmp_path / "run/training_args.bin").is_file()
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", checkpoint.MANIFEST_NAME} <= set(files)
    assert not {"training_args.bin", "trainer_state.json", "notes.txt", ".qerl.lock"} & set(files)
    assert server.repos[REPO]["private"] is True
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    for name, data in files.items():
        (downloaded / name).write_bytes(data)
    assert checkpoint.problems(downloaded) == []
    card = server.text(REPO)["README.md"]
    assert "someone/data" in card
    assert "base_model_relation: finetune" in card or "base_model" not in card
    assert "LoRA" not in card


@fault("S.token_in_uploads")
def test_a_token_in_a_published_text_refuses_the_upload(server, tiny_model_dir, tiny_tokenizer, tmp_path):  # noqa: F811
    trainer = run(tiny_model_dir, tiny_tokenizer, tmp_path, base_format="full")
    trainer.save_model(push=False)
    config = tmp_path / "run/config.json"
    trainer.model.config.note = SECRET
    with pytest.raises(RuntimeError, match=r"config\.json contains the value of model_init_kwargs\.token") as error:
        trainer.push_to_hub()
    assert "Remove it" in str(error.value)
    assert json.loads(config.read_text())["note"] == SECRET
    assert server.requests == []
