"""The examples as `uv run URL` and `hf jobs uv run URL` start them: one file alone, its requirements in its header."""

import dataclasses
import importlib.metadata
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi, JobHardware
from packaging.requirements import Requirement
from trl import ModelConfig

from qerl_trl import QeRLConfig
from qerl_trl.support.recipes import config_file
from qerl_trl.tasks.task import TaskArguments

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RAW = PROJECT["urls"]["Repository"].replace("github.com", "raw.githubusercontent.com") + "/main/"
#: PEP 723's own expression
HEADER = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
# without a header: it imports the example beside it
ALONE = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "tool_call"]
QUICKSTART = (ROOT / "docs" / "source" / "quickstart.md").read_text()


def is_ours(requirement: Requirement) -> bool:
    return requirement.name == PROJECT["name"] and requirement.url == f"git+{PROJECT['urls']['Repository']}"


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.stem)
def test_header(path):
    (found,) = HEADER.finditer(path.read_text())
    assert found["type"] == "script"
    header = tomllib.loads("".join(line[2:] for line in found["content"].splitlines(keepends=True)))
    assert header["requires-python"] == PROJECT["requires-python"]
    (requirement,) = map(Requirement, header["dependencies"])
    assert is_ours(requirement)
    # math is imported by what the script runs, trackio is the logger where it is installed
    assert requirement.extras == {"math", "track"} <= PROJECT["optional-dependencies"].keys()
    siblings = {other.stem for other in path.parent.glob("*.py")}
    assert not set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)) & siblings


def line_of(start: str) -> list[str]:
    (line,) = (line for line in QUICKSTART.splitlines() if line.startswith(start))
    return shlex.split(line)


def check_script(words: list[str]) -> None:
    script = words[next(i for i, word in enumerate(words) if word.startswith("https://"))]
    assert (ROOT / script.removeprefix(RAW)) in ALONE
    assert config_file(words[words.index("--config") + 1]).is_file()


def test_the_line_for_uv():
    check_script(line_of("uv run https"))


def test_the_line_for_jobs(monkeypatch):
    """Through huggingface_hub's own command line, with the script as a file: it reads the header, and sends no job."""
    words = line_of("hf jobs uv run")
    check_script(words)
    arguments = [str(ROOT / word.removeprefix(RAW)) if word.startswith(RAW) else word for word in words]
    sent = {}

    def run(self, script, **options):
        sent.update(options, script=script)
        raise SystemExit(0)

    monkeypatch.setattr(HfApi, "run_uv_job", run)
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 20)
    (hf,) = importlib.metadata.entry_points(group="console_scripts", name="hf")
    with pytest.raises(SystemExit) as ended:
        hf.load()()
    assert ended.value.code == 0 and sent["script"] == str(ROOT / "examples" / "grpo_gsm8k.py")
    (requirement,) = map(Requirement, sent["dependencies"])
    assert is_ours(requirement) and requirement.extras == {"vllm", "bnb"} <= PROJECT["optional-dependencies"].keys()
    assert sent["flavor"] in {hardware.value for hardware in JobHardware} and "HF_TOKEN" in sent["secrets"]
    given = sent["script_args"]
    recipe = yaml.safe_load(config_file(given[given.index("--config") + 1]).read_text())
    fields = {*recipe, *(word[2:] for word in given if word.startswith("--"))} - {"config"}
    known = {f.name for cls in (TaskArguments, QeRLConfig, ModelConfig) for f in dataclasses.fields(cls)}
    assert fields <= known
