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

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RAW = PROJECT["urls"]["Repository"].replace("github.com", "raw.githubusercontent.com") + "/main/"
#: the expression of PEP 723
HEADER = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
# tool_call imports another example
ALONE = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.stem != "tool_call"]


def extras_of(dependencies: list[str]) -> set[str]:
    """Extras of the only dependency, this package from its repository."""
    (requirement,) = map(Requirement, dependencies)
    assert (requirement.name, requirement.url) == (PROJECT["name"], f"git+{PROJECT['urls']['Repository']}")
    assert requirement.extras <= PROJECT["optional-dependencies"].keys()
    return requirement.extras


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.stem)
def test_header(path):
    (found,) = HEADER.finditer(path.read_text())
    header = tomllib.loads("".join(line[2:] for line in found["content"].splitlines(keepends=True)))
    assert found["type"] == "script" and header["requires-python"] == PROJECT["requires-python"]
    assert extras_of(header["dependencies"]) == {"math", "track"}
    siblings = {other.stem for other in path.parent.glob("*.py")}
    assert not set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)) & siblings


def test_the_line_for_jobs(monkeypatch):
    """Through huggingface_hub's own command line, with the script as a file: it reads the header, and sends no job."""
    page = (ROOT / "docs" / "source" / "quickstart.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("hf jobs uv run"))
    words = [str(ROOT / word.removeprefix(RAW)) if word.startswith(RAW) else word for word in shlex.split(line)]
    assert {Path(word) for word in words} & set(ALONE) and not any(word.startswith("https") for word in words)
    recipe = config_file(words[words.index("--config") + 1])
    sent = {}

    def run(self, script, **options):
        sent.update(options, script=script)
        raise SystemExit(0)

    monkeypatch.setattr(HfApi, "run_uv_job", run)
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 20)
    (hf,) = importlib.metadata.entry_points(group="console_scripts", name="hf")
    with pytest.raises(SystemExit) as ended:
        hf.load()()
    assert ended.value.code == 0 and sent["script"] == str(ROOT / "examples" / "grpo_gsm8k.py")
    assert extras_of(sent["dependencies"]) >= {"vllm", "bnb"}
    assert sent["flavor"] in {hardware.value for hardware in JobHardware} and "HF_TOKEN" in sent["secrets"]
    options = {word[2:] for word in sent["script_args"] if word.startswith("--")} - {"config"}
    known = {f.name for cls in (TaskArguments, QeRLConfig, ModelConfig) for f in dataclasses.fields(cls)}
    assert {*yaml.safe_load(recipe.read_text()), *options} <= known
