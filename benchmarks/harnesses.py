"""Evaluate what this package writes with other people's harnesses, by the commands of [`harness_commands`].

    python benchmarks/harnesses.py --lm-eval VENV/bin/python --lighteval OTHER/bin/python    # writes results/harnesses_cpu.json

Each harness is in an environment of its own (the extras `eval` and `lighteval`). The embedded model is trained for a few steps; its NVFP4 base
and its merge are then evaluated on the embedded example's held-out problems, which stand in for GSM8K's: same columns, and nothing is
downloaded. lighteval fetches a file of another benchmark (tinyBenchmarks.pkl) from GitHub whenever it starts and does not have it; for the
recorded run, which had no network, an empty file stood in its place, and GSM8K does not read it.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]  # tests load this file by its path

import common  # noqa: E402

RESULTS = common.RESULTS / "harnesses_cpu.json"
PROBLEMS = common.ROOT / "examples" / "assets" / "test.jsonl"
PACKAGES = {"lm-eval": "lm_eval", "lighteval": "lighteval"}
#: a size of batch: a CPU has no memory limit to look for
_NO_SEARCH = {"lm-eval": ["--batch_size", "16"], "lighteval": ["batch_size=16"]}
#: lighteval's GSM8K with other problems, and asked as the embedded model was taught
LIGHTEVAL_TASK = """
from dataclasses import replace

from lighteval.tasks.requests import Doc
from lighteval.tasks.tasks.gsm8k import gsm8k


def ask(line, task_name=None):
    return Doc(task_name=task_name, query=line["question"], choices=[line["answer"].split("####")[-1]], gold_index=0)


changed = {"name": "gsm8k_local", "prompt_function": ask, "hf_repo": %r, "hf_subset": "default", "generation_size": 64}
TASKS_TABLE = [replace(gsm8k, **changed, hf_avail_splits=["test"], evaluation_splits=["test"])]
"""


def lm_eval_task(problems: Path) -> dict[str, Any]:
    """lm-eval's description of a task that has GSM8K's columns, read from a file."""
    last_number = {"function": "regex", "group_select": -1, "regex_pattern": "(-?[0-9.,]+)"}
    return {
        "task": "gsm8k_cot",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(problems)}},
        "output_type": "generate_until",
        "test_split": "test",
        "num_fewshot": 0,
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer.split('####')[-1].strip()}}",
        "generation_kwargs": {"do_sample": False, "until": ["Q:"], "max_gen_toks": 64},
        "filter_list": [{"name": "last-number", "filter": [last_number, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def harness_commands(model: str, run: str | None = None) -> dict[str, str]:
    """Command lines that evaluate a model on GSM8K with lm-evaluation-harness and with lighteval: {"lm-eval": ..., "lighteval": ...}.

    Their prompts and answer extraction are their own: numbers are comparable within a harness, not across.

    Args:
        model: folder or Hub id that transformers loads. Not read if there is a `run`.
        run: run, checkpoint or adapter. Its merge is what they evaluate, and "first" is the command that writes it: what was trained is the
            adapter on the base as it is rounded to 4 bits, and a harness would put it on the base as it is stored.
    """
    first = {}
    if run:
        model = f"{run.rstrip('/')}-merged"
        first = {"first": shlex.join(["qerl-trl", "merge", run, model])}
    return first | {
        "lm-eval": shlex.join(
            [
                *["lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=bfloat16"],
                *["--tasks", "gsm8k_cot", "--apply_chat_template", "--batch_size", "auto", "--output_path", "eval-lm"],
            ]
        ),
        "lighteval": shlex.join(["lighteval", "accelerate", f"model_name={model},dtype=bfloat16", "gsm8k|5"]),
    }


def on_local_problems(harness: str, command: str, folder: Path, python: str, limit: int) -> list[str]:
    """The printed command, run by `python`, with local problems in the place of the Hub's; everything it needs is written into `folder`."""
    words = shlex.split(command)[1:]
    if harness == "lm-eval":
        (folder / "gsm8k_cot.yaml").write_text(json.dumps(lm_eval_task(PROBLEMS)))  # JSON is YAML
        here = ["--include_path", str(folder), "--limit", str(limit), "--device", "cpu", *_NO_SEARCH[harness]]
        return [python, "-m", "lm_eval", *words, *here]
    (folder / "data").mkdir()
    (folder / "data" / "test.jsonl").write_text(PROBLEMS.read_text())
    (folder / "task.py").write_text(LIGHTEVAL_TASK % str(folder / "data"))
    words = [word.replace("gsm8k|5", "gsm8k_local|0") for word in words]
    words = [
        f"{word},batch_size=16" if word.startswith("model_name=") else word for word in words
    ]  # a CPU has none to find
    here = ["--custom-tasks", str(folder / "task.py"), "--max-samples", str(limit), "--output-dir", str(folder / "out")]
    return [python, "-m", "lighteval", *words, *here]


def accuracy(harness: str, folder: Path) -> float:
    """What the harness wrote into its results, as a share."""
    (path,) = folder.rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    if harness == "lm-eval":
        return float(results["gsm8k_cot"]["exact_match,last-number"])
    return float(results["gsm8k_local|0"]["extractive_match"])


def evaluate(harness: str, model: str, python: str, limit: int) -> dict[str, Any]:
    """Accuracy and seconds of one harness on one folder, and the version that was run.

    Raises:
        `RuntimeError`: the harness failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "model").symlink_to(model)  # lighteval would keep its cache in the folder of an absolute path
        words = on_local_problems(harness, harness_commands("model")[harness], folder, python, limit)
        environment = {
            **os.environ,
            "HF_HOME": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        begun = time.monotonic()
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(words)}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
        found = accuracy(harness, folder)
        seconds = time.monotonic() - begun
    code = f"import importlib.metadata as m; print(m.version({PACKAGES[harness]!r}))"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return {"harness": harness, "version": version, "accuracy": round(found, 4), "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", required=True, metavar="PYTHON")
    parser.add_argument("--lighteval", required=True, metavar="PYTHON")
    parser.add_argument("--limit", type=int, default=100, help="problems")
    options = parser.parse_args()
    pythons = {"lm-eval": options.lm_eval, "lighteval": options.lighteval}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run = folder / "run"
        training = ["train", "--config", "embedded", "--output_dir", str(run), "--max_steps", "3", "--save_steps", "3"]
        merging = shlex.split(harness_commands("", str(run))["first"])[1:-1]
        steps = [[*training, "--eval_problems", "8", "--use_cpu", "true"]]
        steps += [["merge", str(run), "base", "--as", "base"], [*merging, "run-merged"]]
        for step in steps:
            command = [sys.executable, "-m", "qerl_trl.cli.main", *step]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        trained = json.loads((run / "trainer_state.json").read_text())["global_step"]
        models = {"the NVFP4 base": "base", "the trained policy, merged": "run-merged"}
        results = [
            {"model": said} | evaluate(harness, str(folder / name), python, options.limit)
            for said, name in models.items()
            for harness, python in pythons.items()
        ]
    record = {
        "command": "python benchmarks/harnesses.py --lm-eval PYTHON --lighteval PYTHON",
        "commit": (common.commit() or "unknown")[:7],
        "problems": options.limit,
        "steps of training": trained,
        "results": results,
    }
    common.save(record, RESULTS)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
