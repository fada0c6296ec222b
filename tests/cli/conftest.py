"""Runs as they are when finished: an adapter with its settings, `results.json`, problems."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from qerl_trl.publish import export
from qerl_trl.publish.load import TrainedPolicy
from tests.faults.tiny_runs import make_policy


@pytest.fixture(scope="session")
def save_run(tiny_model_dir, tiny_tokenizer) -> Callable:
    """`save_run(folder, **settings)`: save an adapter with these settings; returns the policy."""

    def save(folder: Path, size: float = 0.2, dtype: str = "float32", **settings):
        model = tiny_model_dir("qwen2")
        policy = make_policy(model, dtype=dtype, size=size)
        common = {"base_format": "nvfp4", "scale_rule": "rtn", "dtype": dtype, "model": str(model)}
        export.save_adapter(TrainedPolicy(policy, tiny_tokenizer, common | settings), folder)
        return policy

    return save


@pytest.fixture(scope="package")
def finished(save_run, tmp_path_factory):
    """(folder of a finished run, its policy). Read-only."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    settings = {"settings_sha256": "5e77", "global_step": 2}
    policy = save_run(folder, **settings)
    results = {
        "after": {"accuracy": 0.5, "interval95": [0.4, 0.6], "total": 10, "correct": 5},
        "log_history": [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.3}],
        "dataset": "someone/data",
        "settings": settings,
        "steps": 2,
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder, policy


@pytest.fixture
def write_rows() -> Callable:
    """`write_rows(file, *rows)`, or five problems with the answers 0 to 4."""

    def write(file: Path, *rows: dict) -> Path:
        rows = rows or tuple({"question": f"{i}?", "answer": f"#### {i}"} for i in range(5))
        file.write_text("\n".join(map(json.dumps, rows)))
        return file

    return write
