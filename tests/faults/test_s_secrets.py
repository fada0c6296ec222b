"""A token by another door: in another form, inside other objects, written as JSON writes it, on another command line."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from peft import LoraConfig
from trl import ModelConfig
from typer.testing import CliRunner

from qerl_trl import QeRLConfig, QeRLRLOOConfig
from qerl_trl.checkpoint import seal
from qerl_trl.cli import main as cli
from qerl_trl.cli import train as arms
from qerl_trl.publish import hub
from qerl_trl.publish.outgoing import HubError
from qerl_trl.support import secrets
from qerl_trl.support.secrets import MASK
from qerl_trl.tasks.task import Task
from tests.faults.catalog import fault, told
from tests.faults.test_r7_hub import everything, merged  # noqa: F401  (a fixture)
from tests.faults.tiny_runs import tiny_runs  # noqa: F401  (a fixture)
from tests.hub_server import TOKEN
from tests.publish.test_hub import REPO, server  # noqa: F401  (a fixture)
from tests.test_trainer import settings

#: of no known form: a secret by the place where it stands only
PLAIN = "kx93-vv02-plain-words"


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    monkeypatch.setattr(secrets, "_given", {})


FORMS = {
    "Anthropic": "sk-ant-api03-AbCd-EfGh_IjKlMnOpQrStUv-WxYz0123456789-abcdefghij_klmno-AA",
    "OpenAI": "sk-proj-abc-DEF_ghi-JKL_mno-PQR_stu-VWX_yz0-123_456",
}


@fault("R7.token")
@pytest.mark.parametrize("name", FORMS)
def test_tokens_of_other_services_are_refused_and_masked(name, tmp_path):
    with pytest.raises(ValueError, match="run_name contains") as error:
        settings(tmp_path, run_name=FORMS[name])
    assert FORMS[name] not in str(error.value) and "HF_TOKEN" in str(error.value)
    assert secrets.redact(f"a {FORMS[name]} b") == f"a {MASK} b"


@fault("R7.token")
@pytest.mark.parametrize(
    "url",
    [
        f"https://{PLAIN}@host/model",
        f"https://:{PLAIN}@host/model",
    ],
)
def test_a_url_of_whatever_argument(url, tmp_path):
    with pytest.raises(ValueError, match=r"vllm_server_base_url contains a password in a URL") as error:
        settings(tmp_path, vllm_server_base_url=url)
    assert PLAIN not in str(error.value) and PLAIN not in secrets.redact(f"could not load {url}")


#: names of variables that say so, in whatever way
SECRET_VARIABLES = (
    "OPENAI_KEY PGPASS HF_TOKEN HF_TOKEN_2 WANDB_API_KEY GITHUBTOKEN AWS_SECRET_ACCESS_KEY DB_PASSWORD".split()
)
#: and of those that do not
OTHER_VARIABLES = """PWD CACHE_KEY HF_TOKEN_PATH TOKENIZERS_PARALLELISM MAX_TOKENS MAX_NEW_TOKENS EOS_TOKEN PAD_TOKEN
    TOKEN_LIMIT TOKENIZER KEYBOARD KEY_FILE API_KEY_HEADER SSH_AUTH_SOCK AUTHOR CREDIT PASSES MASTER_ADDR""".split()


@fault("R7.token")
@pytest.mark.parametrize("variable", SECRET_VARIABLES)
def test_variables_of_the_environment(variable, monkeypatch, tmp_path):
    monkeypatch.setenv(variable, PLAIN)
    seal.write_json_atomically(tmp_path / "results.json", {"note": f"used {PLAIN}"})
    assert json.loads((tmp_path / "results.json").read_text()) == {"note": f"used {MASK}"}


@fault("R7.token")
def test_a_variable_with_blanks_around_its_value(monkeypatch):
    """Of a file that ends with a line break: whoever uses the secret takes them away."""
    monkeypatch.setenv("JUDGE_API_KEY", f" {PLAIN}\n")
    assert secrets.redact(f"refused: {PLAIN}.") == f"refused: {MASK}."
    assert secrets.find(PLAIN) == "the value of JUDGE_API_KEY"


def test_variables_that_hold_no_secret(monkeypatch, tmp_path):
    for variable, value in (*((name, PLAIN) for name in OTHER_VARIABLES), ("SSH_KEY", str(tmp_path))):
        monkeypatch.setenv(variable, value)
        assert secrets.find(f"a {value} b") is None, variable


#: the only arguments whose own name says that a secret is in them
FOR_SECRETS = {"hub_token", "push_to_hub_token"}


@fault("R7.token")
@pytest.mark.parametrize("arguments", [QeRLConfig, QeRLRLOOConfig, ModelConfig, Task, LoraConfig])
def test_every_argument(arguments):
    """A token of a known form, or any in a URL, is refused by the argument's name."""
    for name in {field.name for field in dataclasses.fields(arguments)} - FOR_SECRETS:
        for text in (FORMS["OpenAI"], f"https://someone:{PLAIN}@host/x"):
            with pytest.raises(ValueError, match=rf"{name}\S* contains") as error:
                secrets.check_places({name: text})
            assert FORMS["OpenAI"] not in str(error.value) and PLAIN not in str(error.value)


@fault("R7.token")
def test_the_arguments_that_are_for_secrets(tmp_path):
    for name in FOR_SECRETS & {field.name for field in dataclasses.fields(QeRLConfig)}:
        args = settings(tmp_path, **{name: PLAIN})
        seal.write_json_atomically(tmp_path / "results.json", {"command": f"--run_name {PLAIN}", "args": str(args)})
        assert PLAIN not in (tmp_path / "results.json").read_text() + args.to_json_string() + str(args.to_dict())


@fault("R7.token")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peft_config", LoraConfig(base_model_name_or_path=f"https://someone:{PLAIN}@host/model")),
        ("output_dir", Path(f"runs/{FORMS['OpenAI']}")),
        ("chat_template_kwargs", {"tools": {FORMS["OpenAI"]}}),
        ("fsdp_config", {"deep": [{"er": (f"https://{PLAIN}@host",)}]}),
    ],
)
def test_objects_inside_arguments_are_looked_into(name, value):
    with pytest.raises(ValueError, match=rf"{name}\S* contains"):
        secrets.check_places({name: value})


@fault("R7.token")
@pytest.mark.parametrize(
    "name", ["X-API-Key", "hf-token", "github_token", "private_key", "credentials", "Proxy-Authorization"]
)
def test_names_of_secrets_inside_arguments(name, tmp_path):
    """They are remembered, and masked wherever they turn up later."""
    args = settings(tmp_path, model_init_kwargs={"dtype": "float32", "headers": {name: PLAIN}})
    for text in (str(args), args.to_json_string(), secrets.redact(f"a server said: {PLAIN}")):
        assert PLAIN not in text
    assert args.model_init_kwargs["headers"][name] == PLAIN


def test_a_private_key_is_masked_to_its_end():
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEkx93+/vv02=\n-----END RSA PRIVATE KEY-----"
    for text in (key, json.dumps(key)[1:-1]):
        assert secrets.redact(f"a {text} b") == f"a {MASK} b"


@fault("R7.token")
@pytest.mark.parametrize(
    "text",
    [
        f"QeRLConfig(hub_token='{PLAIN}')",
        f'{{"hub_token": "{PLAIN}"}}',
        f"--hub_token '{PLAIN}'",
        f'--model_init_kwargs \'{{"token": "{PLAIN}"}}\'',
    ],
)
def test_what_others_print(text):
    masked = secrets.redact(text)
    assert PLAIN not in masked and MASK in masked and secrets.redact(masked) == masked


def test_ordinary_texts_are_as_they_were():
    for text in (
        '{"eos_token": "<|endoftext|>", "token_type_ids": "left-to-right", "num_tokens": 144}',
        "https://host/search?key=abc&sort=none http://someone@host/x mailto:a.long.address@host.example",
        "the bearer of good-news-for-all risk-adjusted-return-of-some-long-name task-oriented-dialogue-of-many-turns",
        "rope_theta=10000 --eos_token <end> --tokenizer left Authorization: Bearer $HF_TOKEN",
    ):
        assert secrets.redact(text) == text and secrets.find(text) is None


@fault("S.token_in_uploads")
def test_a_secret_by_the_name_of_its_key_is_not_published(server, merged, tmp_path):  # noqa: F811
    """A tokenizer's file that came with one: nothing else says that it is a secret."""
    folder = Path(shutil.copytree(merged, tmp_path / "merged"))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "headers": {"X-API-Key": PLAIN}}))
    record = seal.recorded_run(folder)
    seal.seal(folder, record)
    with told(HubError, "tokenizer_config.json contains a secret, by the name of 'X-API-Key'", "nothing was uploaded"):
        hub.push_folder(folder, REPO)
    assert not server.repos


def test_what_json_may_have_in_it(tmp_path):
    """A vocabulary has every word, with quotes and colons; a template has places for values."""
    vocabulary = {'token": "': 1, "password": 2, '"secret": "abcdefgh': 3, "api_key='": 4}
    for content in (
        {
            "model": {
                "vocab": vocabulary,
                "merges": [["token", '": "abcdefghijk'], ['password": ', '"longer than that']],
            }
        },
        {"eos_token": "<|end_of_text|>", "token": None, "password": "short", "api_key": "<your key goes here>"},
        {"hub_token": MASK, "credentials": {"user": "someone-else"}},
    ):
        for text in (json.dumps(content), json.dumps(content, indent=2).encode()):
            assert secrets.find(text, is_json=True) is None
    assert secrets.find(json.dumps({"a": [{"hub-token": PLAIN}]}), is_json=True) is not None
    assert secrets.find("{" * 5000 + PLAIN, is_json=True) is None


# --- other command lines ----------------------------------------------------------------------------------------------------------


@fault("R7.token")
def test_the_arms_command_writes_no_token(tmp_path, monkeypatch):
    """It only hands the words on, and had kept them."""
    given = {"--hub_token": PLAIN, "--model_init_kwargs": json.dumps({"token": PLAIN})}

    def train(command, log):
        folder = Path(command[command.index("--output_dir") + 1])
        assert command[command.index("--hub_token") + 1] == PLAIN
        log.write_text("trained")
        folder.mkdir(parents=True)
        return 0

    monkeypatch.setattr(arms, "launch", train)
    monkeypatch.setattr(
        "qerl_trl.tasks.arms.read_run", lambda folder, arm, seed: (_ for _ in ()).throw(RuntimeError("enough"))
    )
    words = ["arms", "embedded", "--arms", "nvfp4", "--seeds", "1", "--output_dir", str(tmp_path / "arms")]
    CliRunner().invoke(cli.app, [*words, *(word for pair in given.items() for word in pair)])
    written = dict(everything(tmp_path))
    assert any(name.endswith("arm.json") for name in written)
    assert not [name for name, content in written.items() if PLAIN.encode() in content]


def test_the_words_of_a_command():
    words = ["run.py", "--hub_token", PLAIN, "--hub-token=" + PLAIN, "--seed", "3", "--eos_token", "x", "--token"]
    masked = ["run.py", "--hub_token", MASK, "--hub-token=" + MASK, "--seed", "3", "--eos_token", "x", "--token"]
    assert secrets.redacted_words(words) == masked


@fault("R7.token")
def test_a_card_that_is_written_by_hand(tiny_runs, tmp_path):  # noqa: F811
    """`create_model_card` writes what it is given, with no upload behind it that would look."""
    trainer = tiny_runs.trainer(tmp_path / "run", max_steps=1)
    trainer.create_model_card(dataset_name=f"https://someone:{PLAIN}@host/data", tags=[FORMS["OpenAI"]])
    card = (tmp_path / "run/README.md").read_text()
    assert "@host/data" in card and PLAIN not in card and FORMS["OpenAI"] not in card


# --- beside the files -------------------------------------------------------------------------------------------------------------


@fault("R7.token")
@pytest.mark.parametrize(
    ("where", "options"),
    [("The commit message", {"message": f"with {TOKEN}"}), ("Its revision", {"revision": TOKEN})],
)
def test_what_the_hub_is_told_beside_files(where, options, server, merged):  # noqa: F811
    with told(HubError, where, "contains a Hugging Face token", "nothing was uploaded", "Choose another"):
        hub.push_folder(merged, REPO, **options)
    assert not server.repos


@fault("R7.token")
def test_the_name_of_a_repository(server, merged):  # noqa: F811
    with told(HubError, "The name of the repository contains", "nothing was uploaded", "Choose another"):
        hub.push_folder(merged, f"someone/{TOKEN}")
    assert not server.repos
