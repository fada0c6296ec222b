"""What counts as a secret, and what comes of it; the product is looked at in tests/faults/test_r7_hub.py."""

import copy
import json
import pickle

import pytest

from qerl_trl import QeRLConfig
from qerl_trl.checkpoint import seal
from qerl_trl.support import secrets
from qerl_trl.support.secrets import MASK, cleaned, find, find_in, known, redact
from tests.hub_server import TOKEN
from tests.trainers import settings

PLAIN = "kx93-vv02-plain-words"  # without a known form: a secret by its name only


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    monkeypatch.setattr(secrets, "_given", {})


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"token {TOKEN}.", f"token {MASK}."),
        (f"https://user:{TOKEN}@host/x", f"https://user:{MASK}@host/x"),
        ("https://user:pass@host/x", f"https://{MASK}@host/x"),
        ("run --hub_token X --seed 3", f"run --hub_token {MASK} --seed 3"),
        ("run --hub-token=X", f"run --hub-token={MASK}"),
        ("-----BEGIN RSA PRIVATE KEY-----", MASK),
        ("run --eos_token X", "run --eos_token X"),
        ("http://localhost:8000/a@b hf_transfer sk-learn", "http://localhost:8000/a@b hf_transfer sk-learn"),
    ],
)
def test_forms(text, masked):
    assert redact(text) == masked
    assert redact(masked) == masked
    assert find(masked) is None


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "MY_SECRET_ID", "GITHUB_TOKEN", "DB_PASSWORD"])
def test_variables_by_their_names(monkeypatch, name):
    assert find(PLAIN) is None
    monkeypatch.setenv(name, PLAIN)
    assert find(f"a {PLAIN} b".encode()) == f"the value of {name}"
    assert redact(f"a {PLAIN} b") == f"a {MASK} b"


def test_short_values_and_other_variables_are_no_secrets(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "postgres")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "a longer value")
    assert not {"postgres", "a longer value"} & set(known())


def test_cleaned_goes_into_containers_and_leaves_objects():
    marker = object()
    given = {"token": PLAIN, "eos_token": "<eos>", "deep": [{"api_key": "x", "url": f"https://a/{TOKEN}"}, marker]}
    assert cleaned(given) == {
        "token": MASK,
        "eos_token": "<eos>",
        "deep": [{"api_key": MASK, "url": f"https://a/{MASK}"}, marker],
    }
    assert cleaned(given, mask=None)["token"] is None
    assert given["token"] == PLAIN


def test_a_file_is_searched_to_its_end(tmp_path):
    text = tmp_path / "tokenizer.json"
    text.write_text("a" * (3 << 20) + TOKEN)
    assert find_in(text) is not None
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(TOKEN.encode() + bytes(1 << 10))
    assert find_in(weights) is not None


@pytest.mark.parametrize(
    "argument",
    [
        {"run_name": TOKEN},
        {"hub_model_id": f"tester/{TOKEN}"},
        {"vllm_server_base_url": "http://user:password@host:8000"},
        {"chat_template_kwargs": {"note": TOKEN}},
        {"model_init_kwargs": {"dtype": "float32", "revision": TOKEN}},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_a_secret_in_any_other_argument_is_refused_by_name(tmp_path, argument):
    with pytest.raises(ValueError, match="HF_TOKEN") as error:
        settings(tmp_path, **argument)
    assert next(iter(argument)) in str(error.value)
    assert TOKEN not in str(error.value) and "user:password" not in str(error.value)


def test_an_engine_that_logs_its_arguments_gets_no_secret(tmp_path):
    with pytest.raises(ValueError, match=r"vllm_engine_kwargs\.hf_token contains a secret.*HF_TOKEN") as error:
        settings(tmp_path, vllm_engine_kwargs={"hf_token": PLAIN})
    assert PLAIN not in str(error.value)


def test_arguments_show_no_secret_and_keep_it(tmp_path):
    args = settings(tmp_path, hub_token=TOKEN, model_init_kwargs={"dtype": "float32", "token": PLAIN})
    texts = [str(args), repr(args), args.to_json_string(), str(args.to_dict()), str(args.to_sanitized_dict())]
    for text in [*texts, pickle.dumps(args).decode("latin-1")]:
        assert TOKEN not in text
        assert PLAIN not in text
    assert args.model_init_kwargs["token"] == PLAIN
    for other in (copy.deepcopy(args), args):
        assert (other.hub_token, other.model_init_kwargs["token"]) == (TOKEN, PLAIN)
    again = pickle.loads(pickle.dumps(args))
    assert isinstance(again, QeRLConfig)
    assert again.hub_token is None
    assert again.model_init_kwargs == {"dtype": "float32", "token": None}
    assert (again.output_dir, again.save_strategy, again.bf16) == (args.output_dir, args.save_strategy, args.bf16)


def test_json_files_hold_no_secret(tmp_path):
    secrets.remember("hub_token", PLAIN)
    command = f'accelerate launch grpo.py --hub_token X --model_init_kwargs {{"token": "{PLAIN}"}} --seed 1'
    seal.write_json_atomically(tmp_path / "results.json", {"command": command, "steps": 3})
    content = json.loads((tmp_path / "results.json").read_text())
    assert content == {"command": command.replace(PLAIN, MASK).replace("_token X", f"_token {MASK}"), "steps": 3}
