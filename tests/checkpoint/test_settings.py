"""The settings that a run records: they refuse a resume of another run, and nothing else does."""

import copy
import json
import shutil

import pytest
from datasets import Dataset, Features, Image, Value
from peft import LoraConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from qerl_trl import QeRLRLOOTrainer, from_pretrained
from qerl_trl.checkpoint import settings as identity
from qerl_trl.checkpoint.fingerprint import base_config
from qerl_trl.checkpoint.settings import recorded_tokenizer as recorded
from qerl_trl.publish.quantize import quantize_folder
from tests.faults.tiny_runs import FILE, PROMPTS, edit


@pytest.fixture
def settings_of(tiny_runs, tmp_path):
    """`settings_of(**options)`: the record of a run with them."""
    return lambda **options: identity.run_settings(tiny_runs.trainer(tmp_path / "run", **options))


@pytest.fixture(scope="module")
def then(tiny_runs, tmp_path_factory):
    """The record of a run, from its file."""
    return json.loads(json.dumps(identity.run_settings(tiny_runs.trainer(tmp_path_factory.mktemp("run")))))


def test_settings_of_a_run(settings_of, then, tiny_runs):
    assert set(then) <= set(identity.RunSettings.__annotations__)
    assert (then["trainer"], then["seed"], then["base_format"], then["dtype"]) == ("GRPO", 42, "nvfp4", "float32")
    assert then["model"] == tiny_runs.model
    assert len(then["base_sha256"]) == 64 and "base_revision" not in then  # it came from a folder
    assert then["lora"]["r"] == 4 and any(name.endswith("q_proj") for name in then["lora"]["targets"])
    assert then["loss_type"] == "dapo" and "aqn_entropy_target" not in then
    assert settings_of(trainer_class=QeRLRLOOTrainer)["trainer"] == "RLOO"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"learning_rate": 2e-3}, "learning_rate: 0.001 then, 0.002 now"),
        ({"epsilon_high": 0.28}, "epsilon_high: not set then, 0.28 now"),
        ({"base_format": "bf16"}, "base_format: 'nvfp4' then, 'bf16' now"),
        (
            {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], use_rslora=True)},
            "lora.options: not set then, {'use_rslora': True} now",
        ),
        (
            {"vllm_engine_kwargs": {"enforce_eager": True, "kv_cache_dtype": "fp8"}},
            "vllm_engine_kwargs: not set then, {'kv_cache_dtype': 'fp8'} now",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_of_the_trajectory_refuses(settings_of, then, changed, line):
    now = settings_of(**changed)
    assert identity.differences(then, now) == ([line], [])
    assert then["settings_sha256"] != now["settings_sha256"]


def test_other_settings_are_no_difference(settings_of, then, tmp_path):
    memory = {"enforce_eager": True, "max_num_seqs": 4, "kv_cache_memory_bytes": 1}
    model = {"dtype": "float32", "token": "t"}
    incidental = {"logging_steps": 5, "save_steps": 3, "output_dir": str(tmp_path / "x"), "rollout_timeout": 5.0}
    now = settings_of(
        **incidental, gradient_checkpointing=True, run_name="r", model_init_kwargs=model, vllm_engine_kwargs=memory
    )
    assert now == then
    longer = settings_of(max_steps=9)
    assert identity.differences(then, longer) == ([], ["max_steps: 2 then, 9 now"])
    assert longer["settings_sha256"] == then["settings_sha256"]
    # a record of no run is compared in the keys it has
    assert identity.differences({"seed": 42, "model": now["model"]}, now) == ([], [])
    assert identity.differences({"seed": 4}, now) == (["seed: 4 then, 42 now"], [])


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_base_has_one_configuration_in_every_form(family, tiny_model_dir, tmp_path):
    folder = tiny_model_dir(family)
    quantize_folder(folder, tmp_path / "packed")
    found = base_config(AutoModelForCausalLM.from_pretrained(folder))
    assert found["num_hidden_layers"] == 2 and "hidden_act" not in found and "dtype" not in found
    assert found == base_config(from_pretrained(folder)) == base_config(from_pretrained(tmp_path / "packed"))


def test_the_base_is_identified_by_its_content(settings_of, then, tiny_runs, tmp_path):
    folder, moved = tiny_runs.model, shutil.copytree(tiny_runs.model, tmp_path / "moved")
    line = f"model: '{folder}' then, '{moved}' now"
    same = settings_of(model=str(moved))
    assert identity.differences(then, same) == ([], [line])
    assert same["settings_sha256"] == then["settings_sha256"]
    edit(moved / FILE, lambda stored: stored["model.embed_tokens.weight"][7].add_(1))
    now = settings_of(model=str(moved))
    [refused] = identity.differences(then, now).refused
    assert refused.startswith("base_sha256: the base model has other weights (")
    assert now["settings_sha256"] != then["settings_sha256"]
    # the commit on the Hub is not compared; a sharded base has no fingerprint, so that its name counts
    assert identity.differences({**then, "base_revision": "abc"}, same).refused == []
    del now["base_sha256"]
    assert identity.differences(then, now).refused == [line]


def test_data_are_identified_by_their_content(tmp_path):
    fingerprint = identity.dataset_sha256
    PROMPTS.to_json(tmp_path / "copy.jsonl")
    assert fingerprint(Dataset.from_json(str(tmp_path / "copy.jsonl"), cache_dir=str(tmp_path))) == fingerprint(PROMPTS)
    changed = [
        PROMPTS.select(range(15)),
        PROMPTS.add_column("answer", ["1"] * 16),
        PROMPTS.map(lambda row, i: {"prompt": row["prompt"] + "." * (i == 15)}, with_indices=True),
        PROMPTS.select(reversed(range(16))),
    ]
    assert len({fingerprint(data) for data in [PROMPTS, *changed]}) == 5
    assert fingerprint(PROMPTS.to_iterable_dataset()) is None
    kinds = Features({"prompt": Value("string"), "image": Image()})
    assert fingerprint(Dataset.from_dict({"prompt": ["a"], "image": [None]}, kinds)) is not None


TEXTS = ["the norm's weights: 12 + 34.5 = 46.5", "more words, and words again", "one Klingon beside nine others"] * 9
SPECIAL = ["<pad>", "<eos>", "<unk>"]


def bytes_of() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": len(alphabet) + 43, "special_tokens": SPECIAL, "initial_alphabet": alphabet}
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(**options))
    return tokenizer


def wrapped():
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_of(), pad_token="<pad>", eos_token="<eos>")
    made.chat_template = "{{ messages[0].content }}"
    return made


def with_added():
    tokenizer = wrapped()
    tokenizer.add_tokens(["<think>", AddedToken("<answer>", lstrip=True)])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<tool>"]})
    return tokenizer


@pytest.mark.parametrize("made", [wrapped, with_added])
def test_a_tokenizer_is_the_same_after_saving_and_loading(made, tmp_path):
    tokenizer = made()
    found = recorded(tokenizer)
    tokenizer(["a", "a b"], padding="max_length", max_length=9, truncation=True)  # the backend remembers the padding
    assert recorded(tokenizer) == found
    for name in ("once", "again"):
        tokenizer.save_pretrained(tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert recorded(tokenizer) == found


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_tokens(["<think>"]),
        lambda t: t.add_special_tokens({"extra_special_tokens": ["<think>"]}),
        lambda t: setattr(t, "chat_template", "{{ messages[-1].content }}"),
        lambda t: setattr(t, "bos_token", "<eos>"),
        lambda t: setattr(t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    ],
    ids=["added", "special", "template", "begin", "split"],
)
def test_a_changed_tokenizer_is_another_one(change):
    tokenizer = wrapped()
    other = copy.deepcopy(tokenizer)
    change(other)
    assert recorded(other)["tokenizer_content_sha256"] != recorded(tokenizer)["tokenizer_content_sha256"]
