"""The README: its code runs, its paths exist, its tables are those of the measurements."""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import yaml
from datasets import Dataset
from trl import ModelConfig, TrlParser

from qerl_trl import QeRLConfig
from qerl_trl.nvfp4.linear import has_nvfp4
from qerl_trl.tasks.task import TaskArguments
from tests.repo.test_configs import SMALL

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SCRIPT = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
#: TRL's line in a comment, and ours
CHANGED = re.compile(r"^# TRL: (.*)\n(.*)\n", re.MULTILINE)


def test_the_changed_import_is_the_diff_of_the_documentation():
    page = (ROOT / "docs/source/index.md").read_text()
    diff = re.search(r"```diff\n(.*?)```", page, re.DOTALL)[1].splitlines()
    ((theirs, ours),) = CHANGED.findall(SCRIPT)
    assert diff == [f"-{theirs}", f"+{ours}"] and len(README.splitlines()) <= 90


def test_the_changed_import_turns_a_trl_script_into_ours(tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch):
    local = shutil.copytree(tiny_model_dir("qwen2"), tmp_path / "local")
    tiny_tokenizer.save_pretrained(local)
    prompts = [[{"role": "user", "content": f"{i}+1?"}] for i in range(2)]
    data = Dataset.from_dict({"prompt": prompts, "solution": ["1", "2"]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: data)
    monkeypatch.chdir(tmp_path)
    for text, name in ((CHANGED.sub(r"\1\n", SCRIPT), "GRPOTrainer"), (SCRIPT, "QeRLGRPOTrainer")):
        small = text.replace("Qwen/Qwen2.5-3B-Instruct", str(local))  # the same script, small
        small = small.replace('output_dir="out"', f'output_dir="{name}", max_completion_length=4, use_cpu=True')
        namespace: dict = {}
        exec(compile(small, "README.md", "exec"), namespace)
        trainer = namespace["trainer"]
        assert type(trainer).__name__ == name
        assert trainer.state.global_step > 0
        assert has_nvfp4(trainer.model) == (text is SCRIPT)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_parses_and_keeps_the_papers_values(path):
    values = yaml.safe_load(path.read_text())
    script_only = {field.name for field in dataclasses.fields(TaskArguments)}
    arguments = [str(part) for key, value in values.items() if key not in script_only for part in (f"--{key}", value)]
    arguments += ["--use_cpu", "true", "--bf16", "false"]
    args, model = TrlParser((QeRLConfig, ModelConfig)).parse_args_into_dataclasses(arguments)
    if values.get("use_cpu") or values["task"] != "gsm8k":
        return
    assert (args.learning_rate, args.temperature, args.beta) == (1e-5, 1.0, 0.0)
    assert (args.epsilon, args.epsilon_high) == (0.2, 0.28)
    assert args.generation_batch_size == 128
    assert model.lora_r == 32
    assert (args.aqn_sigma_start, args.aqn_sigma_end, args.aqn_num_stages) == (1e-2, 5e-4, 10)
    gsm8k = path.stem in SMALL
    assert (args.num_generations, args.max_completion_length) == ((8, 4096) if gsm8k else (16, 8192))
    updates = args.steps_per_generation / args.gradient_accumulation_steps
    assert updates == (4 if gsm8k else 1)


def test_tables_come_from_the_committed_measurements():
    done = subprocess.run([sys.executable, "benchmarks/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
