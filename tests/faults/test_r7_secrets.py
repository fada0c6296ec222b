"""A secret in any form, variable or argument is masked or refused. Publishing is in test_r7_hub.py."""

import copy
import json
import pickle

import pytest

from qerl_trl import QeRLConfig
from qerl_trl.support import secrets
from qerl_trl.support.secrets import MASK
from tests.faults.catalog import fault, raises
from tests.hub_server import TOKEN

#: without a known form: a secret by its name only
PLAIN = "kx93-vv02-plain-words"
ANTHROPIC = "sk-ant-api03-AbCd-EfGh_IjKlMnOpQrStUv-WxYz0123456789-abcdefghij_klmno-AA"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    monkeypatch.setattr(secrets, "_given", {})


def config(folder, **options):
    return QeRLConfig(**{"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", **options})


# --- text ---


@fault("R7.token")
@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (f"token {TOKEN}.", f"token {MASK}."),
        (f"https://user:{TOKEN}@host/x", f"https://user:{MASK}@host/x"),
        ("https://user:pass@host/x", f"https://{MASK}@host/x"),
        ("run --hub_token X --seed 3", f"run --hub_token {MASK} --seed 3"),
        ("run --hub-token=X", f"run --hub-token={MASK}"),
        ("-----BEGIN RSA PRIVATE KEY-----", MASK),
    ],
)
def test_forms(text, masked):
    assert secrets.redact(text) == masked == secrets.redact(masked)
    assert secrets.find(masked) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"eos_token": "<|endoftext|>", "token_type_ids": "left-to-right", "num_tokens": 144}',
        "https://host/search?key=abc&sort=none http://someone@host/x mailto:a.long.address@host.example",
        "the bearer of good-news-for-all risk-adjusted-return-of-some-long-name task-oriented-dialogue-of-many-turns",
        "rope_theta=10000 --eos_token <end> --tokenizer left Authorization: Bearer $HF_TOKEN",
        "run --eos_token X http://localhost:8000/a@b hf_transfer sk-learn",
    ],
)
def test_ordinary_texts_are_unchanged(text):
    assert secrets.redact(text) == text and secrets.find(text) is None


def test_words_in_json_that_are_no_secrets():
    """A vocabulary has every word, with quotes and colons; a template has placeholders."""
    vocabulary = {'token": "': 1, "password": 2, '"secret": "abcdefgh': 3, "api_key='": 4}
    merges = [["token", '": "abcdefghijk'], ['password": ', '"longer than that']]
    for content in (
        {"model": {"vocab": vocabulary, "merges": merges}},
        {"eos_token": "<|end_of_text|>", "token": None, "password": "short", "api_key": "<your key goes here>"},
        {"hub_token": MASK, "credentials": {"user": "someone-else"}},
    ):
        for text in (json.dumps(content), json.dumps(content, indent=2).encode()):
            assert secrets.find(text, is_json=True) is None
    assert secrets.find(json.dumps({"a": [{"hub-token": PLAIN}]}), is_json=True) is not None
    assert secrets.find("{" * 5000 + PLAIN, is_json=True) is None


#: variables with a secret's name, and others
SECRET_VARIABLES = (
    "OPENAI_KEY PGPASS HF_TOKEN HF_TOKEN_2 WANDB_API_KEY GITHUBTOKEN AWS_SECRET_ACCESS_KEY DB_PASSWORD MY_SECRET_ID"
)
OTHER_VARIABLES = """PWD CACHE_KEY HF_TOKEN_PATH TOKENIZERS_PARALLELISM MAX_TOKENS MAX_NEW_TOKENS EOS_TOKEN PAD_TOKEN
    TOKEN_LIMIT TOKENIZER KEYBOARD KEY_FILE API_KEY_HEADER SSH_AUTH_SOCK AUTHOR CREDIT PASSES MASTER_ADDR"""


@fault("R7.token")
def test_variables_of_the_environment(monkeypatch):
    for variable in SECRET_VARIABLES.split():
        with monkeypatch.context() as given:
            given.setenv(variable, f" {PLAIN}\n")  # of a file that ends with a line break
            assert secrets.redact(f"refused: {PLAIN}.") == f"refused: {MASK}.", variable
            assert secrets.find(f"a {PLAIN} b".encode()) in (f"the value of {variable}", "the Hub token")
    for variable in OTHER_VARIABLES.split():
        monkeypatch.setenv(variable, PLAIN)
        assert secrets.find(f"a {PLAIN} b") is None, variable
    monkeypatch.setenv("SOME_TOKEN", "postgres")
    assert "postgres" not in secrets.known()


# --- arguments ---


@fault("R7.token")
@pytest.mark.parametrize(
    ("argument", "secret"),
    [
        ({"run_name": ANTHROPIC}, ANTHROPIC),
        ({"output_dir": f"runs/{TOKEN}"}, TOKEN),
        ({"vllm_engine_kwargs": {"hf_token": PLAIN}}, PLAIN),
        ({"model_init_kwargs": {"dtype": "float32", "revision": TOKEN}}, TOKEN),
        ({"vllm_server_base_url": f"https://someone:{PLAIN}@host/model"}, PLAIN),
    ],
)
def test_a_token_in_an_argument_that_is_shown_is_refused(argument, secret, tmp_path):
    with raises(ValueError, next(iter(argument)), "HF_TOKEN") as refused:
        config(tmp_path, **argument)
    assert secret not in str(refused.value) and secret not in secrets.redact(f"could not load {argument}")


@fault("R7.token")
@pytest.mark.parametrize("name", ["token", "X-API-Key"])
def test_secrets_inside_arguments_are_masked_and_kept(name, tmp_path):
    """They are remembered, and masked wherever they turn up later."""
    args = config(tmp_path, hub_token=TOKEN, model_init_kwargs={"dtype": "float32", "headers": {name: PLAIN}})
    texts = [str(args), repr(args), args.to_json_string(), str(args.to_dict()), str(args.to_sanitized_dict())]
    texts += [pickle.dumps(args).decode("latin-1"), secrets.redact(f"a server said: {PLAIN}")]
    assert not [text for text in texts if TOKEN in text or PLAIN in text]
    for each in (args, copy.deepcopy(args)):
        assert (each.hub_token, each.model_init_kwargs["headers"][name]) == (TOKEN, PLAIN)
    again = pickle.loads(pickle.dumps(args))
    assert isinstance(again, QeRLConfig) and again.hub_token is None
    assert again.model_init_kwargs == {"dtype": "float32", "headers": {name: None}}
    assert (again.output_dir, again.save_strategy, again.bf16) == (args.output_dir, args.save_strategy, args.bf16)
