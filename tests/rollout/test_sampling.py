"""The policy of a rollout, inside any wrapper, and the end tokens of a completion."""

import json
import shutil
from pathlib import Path

import pytest
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from qerl_trl import QeRLGRPOTrainer, Script
from qerl_trl.rollout.sampling import end_tokens, of_the_model_alone, save_generation_config, stored
from tests.faults.tiny_runs import call

ASSETS = Path(__file__).resolve().parents[2] / "examples/assets"


def test_generation_config_is_ignored_inside_a_wrapper():
    model, wrapped = nn.Linear(2, 2), nn.Module()
    model.generation_config = own = GenerationConfig(min_p=0.5, eos_token_id=3)
    wrapped.add_module("module", model)
    with of_the_model_alone(wrapped):
        assert (model.generation_config.min_p, model.generation_config.eos_token_id) == (None, 3)
    assert model.generation_config is own and own.min_p == 0.5


# --- end tokens ---

ABSENT = object()
START, END, TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"  # 1, 2 and 0 of the embedded tokenizers
CHATML = None  # their own template
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
STRICT = "{{ raise_exception('only tools') }}"
#: end tokens of tokenizer, generation_config.json and config.json; chat template; expected end tokens
KINDS = {
    "Qwen, instruct": (END, [2, 0], 2, CHATML, {0, 2}),
    "Qwen, base": (TEXT, 0, 0, CHATML, {0, 2}),
    "no generation_config.json": (END, ABSENT, [500, 0], CHATML, {0, 2, 500}),
    "another in the template": (START, 500, 500, CHATML, {1, 2, 500}),
    "a template that ends with text": (TEXT, 0, 0, PLAIN, {0}),
    "a template that refuses the messages": (TEXT, 0, 0, STRICT, {0}),
    "no template": (TEXT, 0, 0, "", {0}),
    "an id outside of the vocabulary": (END, [2, 9999], 2, CHATML, {2}),
}


def base(folder, own, generation, config, template):
    """Folder of a model with these end tokens and template."""
    shutil.copytree(ASSETS / "tiny-qwen2", folder)
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": None if value is ABSENT else value}))
    if generation is ABSENT:
        (folder / "generation_config.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = own
    tokenizer.chat_template = tokenizer.chat_template if template is CHATML else template or None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


def listed(folder):
    ids = json.loads((Path(folder) / "generation_config.json").read_text()).get("eos_token_id")
    return {ids} if isinstance(ids, int) else set(ids or ())


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_ends_at_the_tokens_of_tokenizer_model_and_template(kind, tmp_path):
    *given, expected = KINDS[kind]
    folder = base(tmp_path / "base", *given)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), stored(folder, AutoConfig.from_pretrained(folder))
    ends = end_tokens(model, tokenizer)
    assert set(ends) == expected and len(ends) == len(expected)
    model.generation_config.eos_token_id = ends
    save_generation_config(tmp_path, model, tokenizer)
    assert listed(tmp_path) == expected


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder with a base whose end token is neither its tokenizer's nor its template's, and a run of two steps."""
    folder = tmp_path_factory.mktemp("ends")
    base = Path(shutil.copytree(ASSETS / "tiny-tasks", folder / "base"))
    for name in ("config.json", "generation_config.json"):
        (base / name).write_text(json.dumps(json.loads((base / name).read_text()) | {"eos_token_id": 500}))
    options = {"config": "letters", "model_name_or_path": base, "output_dir": folder / "run", "max_steps": 2}
    options |= {"eval_problems": 40, "per_device_train_batch_size": 32, "save_strategy": "no", "learning_rate": 1e-3}
    script = Script.parse(argv=[str(word) for name, value in options.items() for word in (f"--{name}", value)])
    script.train(QeRLGRPOTrainer(**script.trainer_arguments()))
    return folder


def test_eval_measures_the_accuracy_of_the_run(finished, tmp_path):
    """Once a run that reached 68 % was measured at 0.5 %."""
    results = json.loads((finished / "run/results.json").read_text())
    assert results["before"]["accuracy"] > 0 and listed(finished / "run") == {2, 500}
    words = ("--task", "letters", "--limit", 40, "--json", "--max-new-tokens", 16, "--output", tmp_path / "b")
    code, out, err = call("eval", finished / "run", *words)
    assert code == 0, err
    assert json.loads(out)["accuracy"] == results["after"]["accuracy"] > 0


@pytest.mark.parametrize("form", ["bf16", "nvfp4", "base", "adapter", "quantize"])
def test_exports_have_the_end_tokens_of_the_run(finished, tmp_path, form):
    if form == "quantize":
        words = ("quantize", finished / "base", tmp_path / form)
    else:
        words = ("merge", finished / "run", tmp_path / form, "--as", form, *["--force"] * (form == "nvfp4"))
    code, _, err = call(*words)
    assert code == 0, err
    assert listed(tmp_path / form) == {2, 500}
    if form == "adapter":
        assert "eos_token_id = [2, 500]" in (tmp_path / form / "README.md").read_text()
