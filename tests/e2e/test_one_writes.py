"""Of two processes only the first writes and publishes. Each works in a folder of its own."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from qerl_trl import QeRLGRPOTrainer
from qerl_trl.checkpoint import seal
from qerl_trl.publish import hub
from qerl_trl.tasks.run import train_and_measure
from qerl_trl.tasks.script import Script
from tests.e2e.sharding import FSDP, as_accelerators
from tests.hub_server import REPO
from tests.ranks import on_ranks

RUN = {
    "output_dir": "run", "max_steps": 2, "save_strategy": "steps", "save_steps": 2, "eval_problems": 3,
    "eval_batch_size": 1, "generation_batch_size": 16, "updates_per_rollout": 2, "per_device_train_batch_size": 2,
    "num_generations": 4, "max_completion_length": 24, "disable_tqdm": True, "push_to_hub": True,
    "hub_model_id": REPO, "hub_base_model": "someone/base", "hub_strategy": "end",
}  # fmt: skip


def as_if_shared(trainer: QeRLGRPOTrainer, first: Path) -> None:
    """Copy this process's RNG state, needed for a resume, to the first one's checkpoint."""
    save = trainer._save_rng_state

    def both(path: str) -> None:
        save(path)
        (first / path).mkdir(parents=True, exist_ok=True)
        for file in Path(path).glob("rng_state_*"):
            shutil.copy(file, first / path)

    trainer._save_rng_state = both


def measured(rank: int, folder: Path, sharded: bool) -> dict:
    torch.set_num_threads(1)
    if rank > 0:
        hub.HfApi = None  # it must not ask the Hub
    if sharded:
        os.environ |= FSDP
        as_accelerators()
    words = [text for name, value in RUN.items() for text in (f"--{name}", str(value))]
    script = Script.parse(argv=["--config", "examples/configs/embedded.yaml", *words])
    arguments = script.trainer_arguments()
    os.chdir(folder / str(rank))
    trainer = QeRLGRPOTrainer(**arguments)
    if rank > 0:
        as_if_shared(trainer, folder / "0")
    results = train_and_measure(trainer, script.task, script.eval_problems, script.eval_batch_size)
    trainer.save_adapter("adapter")
    with pytest.raises(AssertionError if rank else ValueError, match="rank 0" if rank else "already exists"):
        trainer.save_adapter("adapter")
    trainer.create_model_card()
    return {"steps": trainer.state.global_step, "results": sorted(results)}


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_only_the_first_process_writes(sharded, server, tmp_path):
    folders = [tmp_path / str(rank) for rank in range(2)]
    for folder in folders:
        folder.mkdir()
    outcomes = on_ranks(2, lambda rank: measured(rank, tmp_path, sharded), timeout=400)
    for outcome in outcomes:
        assert isinstance(outcome.answer, dict), outcome
        assert outcome.answer["steps"] == RUN["max_steps"]
    first, second = ({str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} for folder in folders)
    assert second == {"run/checkpoint-2/rng_state_1.pth"}
    own = {"results.json", "README.md", "adapter_model.safetensors", "checkpoint-2/rng_state_0.pth"}
    assert {f"run/{name}" for name in own} <= first
    for sealed in ("run", "run/checkpoint-2", "adapter"):
        assert seal.problems(folders[0] / sealed) == []
    assert [bool(outcome.answer["results"]) for outcome in outcomes] == [True, False]
    assert json.loads((folders[0] / "run/results.json").read_text())["steps"] == RUN["max_steps"]
    assert len(server.repos[REPO]["commits"]) == 1
