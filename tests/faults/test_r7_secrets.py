"""A token in another form, in a variable, on another command line. What is published: test_r7_hub.py."""

import dataclasses
import json
from pathlib import Path

import pytest
from peft import LoraConfig
from trl import ModelConfig

from qerl_trl import QeRLConfig
from qerl_trl.cli import train as arms
from qerl_trl.support import secrets
from qerl_trl.support.secrets import MASK
from qerl_trl.tasks.task import Task
from tests.faults.catalog import fault, told
from tests.faults.tiny_runs import call
from tests.hub_server import TOKEN

#: of no known form: a secret by the place where it stands only
PLAIN = "kx93-vv02-plain-words"
OPENAI = "sk-proj-abc-DEF_ghi-JKL_mno-PQR_stu-VWX_yz0-123_456"
ANTHROPIC = "sk-ant-api03-AbCd-EfGh_IjKlMnOpQrStUv-WxYz0123456789-abcdefghij_klmno-AA"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    monkeypatch.setattr(secrets, "_given", {})


def config(folder, **options):
    return QeRLConfig(**{"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", **options})


@fault("R7.token")
@pytest.mark.parametrize(
    ("argument", "secret"),
    [
        ({"run_name": TOKEN}, TOKEN),
        ({"run_name": ANTHROPIC}, ANTHROPIC),
        ({"run_name": OPENAI}, OPENAI),
        ({"output_dir": f"runs/{TOKEN}"}, TOKEN),
        ({"hub_model_id": f"someone/{TOKEN}"}, TOKEN),
        ({"report_to": [f"https://{TOKEN}@tracker"]}, TOKEN),
        ({"vllm_engine_kwargs": {"download_dir": f"/x/{TOKEN}"}}, TOKEN),
        ({"vllm_server_base_url": f"https://{PLAIN}@host/model"}, PLAIN),
        ({"vllm_server_base_url": f"https://someone:{PLAIN}@host/model"}, PLAIN),
    ],
)
def test_a_token_where_it_would_be_seen_is_refused_by_the_arguments_name(argument, secret, tmp_path):
    with told(ValueError, next(iter(argument)), "HF_TOKEN") as refused:
        config(tmp_path, **argument)
    assert secret not in str(refused.value) and secret not in secrets.redact(f"could not load {argument}")


#: the only arguments whose own name says that a secret is in them
FOR_SECRETS = {"hub_token", "push_to_hub_token"}


@fault("R7.token")
@pytest.mark.parametrize("arguments", [QeRLConfig, ModelConfig, Task, LoraConfig])
def test_every_argument(arguments):
    for name in {field.name for field in dataclasses.fields(arguments)} - FOR_SECRETS:
        for text in (OPENAI, f"https://someone:{PLAIN}@host/x"):
            with pytest.raises(ValueError, match=rf"{name}\S* contains") as error:
                secrets.check_places({name: text})
            assert OPENAI not in str(error.value) and PLAIN not in str(error.value)


@fault("R7.token")
@pytest.mark.parametrize("name", ["X-API-Key", "hf-token", "private_key", "credentials", "Proxy-Authorization"])
def test_names_of_secrets_inside_arguments(name, tmp_path):
    """They are remembered, and masked wherever they turn up later."""
    args = config(tmp_path, model_init_kwargs={"dtype": "float32", "headers": {name: PLAIN}})
    for text in (str(args), args.to_json_string(), secrets.redact(f"a server said: {PLAIN}")):
        assert PLAIN not in text
    assert args.model_init_kwargs["headers"][name] == PLAIN


#: variables whose names say that they hold a secret, in whatever way, and others
SECRET_VARIABLES = (
    "OPENAI_KEY PGPASS HF_TOKEN HF_TOKEN_2 WANDB_API_KEY GITHUBTOKEN AWS_SECRET_ACCESS_KEY DB_PASSWORD".split()
)
OTHER_VARIABLES = """PWD CACHE_KEY HF_TOKEN_PATH TOKENIZERS_PARALLELISM MAX_TOKENS MAX_NEW_TOKENS EOS_TOKEN PAD_TOKEN
    TOKEN_LIMIT TOKENIZER KEYBOARD KEY_FILE API_KEY_HEADER SSH_AUTH_SOCK AUTHOR CREDIT PASSES MASTER_ADDR""".split()


@fault("R7.token")
def test_variables_of_the_environment(monkeypatch):
    for variable in SECRET_VARIABLES:
        with monkeypatch.context() as given:
            given.setenv(variable, f" {PLAIN}\n")  # of a file that ends with a line break
            assert secrets.redact(f"refused: {PLAIN}.") == f"refused: {MASK}.", variable
            assert secrets.find(PLAIN) is not None
    for variable in OTHER_VARIABLES:
        monkeypatch.setenv(variable, PLAIN)
        assert secrets.find(f"a {PLAIN} b") is None, variable


def test_ordinary_texts_are_as_they_were():
    for text in (
        '{"eos_token": "<|endoftext|>", "token_type_ids": "left-to-right", "num_tokens": 144}',
        "https://host/search?key=abc&sort=none http://someone@host/x mailto:a.long.address@host.example",
        "the bearer of good-news-for-all risk-adjusted-return-of-some-long-name task-oriented-dialogue-of-many-turns",
        "rope_theta=10000 --eos_token <end> --tokenizer left Authorization: Bearer $HF_TOKEN",
    ):
        assert secrets.redact(text) == text and secrets.find(text) is None


def test_what_json_may_have_in_it():
    """A vocabulary has every word, with quotes and colons; a template has places for values."""
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


@fault("R7.token")
def test_the_arms_command_writes_no_token(tmp_path, monkeypatch):
    """It hands the words on, and keeps none."""
    given = {"--hub_token": PLAIN, "--model_init_kwargs": json.dumps({"token": PLAIN})}

    def train(command, log):
        folder = Path(command[command.index("--output_dir") + 1])
        assert command[command.index("--hub_token") + 1] == PLAIN
        log.write_text("trained")
        folder.mkdir(parents=True)
        return 0

    def read(folder, arm, seed):
        raise RuntimeError("enough")

    monkeypatch.setattr(arms, "launch", train)
    monkeypatch.setattr("qerl_trl.tasks.arms.read_run", read)
    words = ["arms", "embedded", "--arms", "nvfp4", "--seeds", "1", "--output_dir", tmp_path / "arms"]
    with pytest.raises(RuntimeError, match="enough"):
        call(*words, *(word for pair in given.items() for word in pair))
    written = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert "arm.json" in written
    assert not [name for name, content in written.items() if PLAIN.encode() in content]


@fault("R7.token")
def test_a_card_that_is_written_by_hand(tiny_runs, tmp_path):
    """`create_model_card` writes what it is given."""
    trainer = tiny_runs.trainer(tmp_path / "run")
    trainer.create_model_card(dataset_name=f"https://someone:{PLAIN}@host/data", tags=[OPENAI])
    card = (tmp_path / "run/README.md").read_text()
    assert "@host/data" in card and PLAIN not in card and OPENAI not in card
