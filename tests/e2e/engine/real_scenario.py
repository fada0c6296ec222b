"""Two steps of GRPO on a real model in bf16, with the recipe of `make demo-real` and the real vLLM engine, arm by arm.

python real_scenario.py FOLDER BASE_FORMAT NOISE MODEL [BASE_FORMAT NOISE MODEL]...
"""

# ruff: noqa: E402  (vLLM reads its environment when it is imported)

import json
import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[0] = str(ROOT)

from tests.e2e.engine.environment import DEFAULTS

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)

from qerl_trl import QeRLGRPOTrainer, Script, Task
from qerl_trl.rollout import probe
from tests.e2e.engine.engines import _ALIVE, MEMORY

# bf16 is slow on a CPU without instructions for it (5 GFLOP/s a core), so everything is short
OPTIONS = {
    "dtype": "bfloat16", "use_vllm": "true", "vllm_mode": "colocate", "vllm_max_model_length": 64, "max_steps": 2,
    "aqn_num_stages": 2, "vllm_gpu_memory_utilization": MEMORY["gpu_memory_utilization"],
    "vllm_engine_kwargs": json.dumps({"enforce_eager": True, **MEMORY}), "per_device_train_batch_size": 2,
    "num_generations": 2, "max_completion_length": 4, "temperature": 1.5, "learning_rate": 1e-3, "eval_problems": 1,
    "disable_tqdm": "true",
}  # fmt: skip
TASK = ROOT / "examples" / "tasks" / "products.yaml"
PROBED = 4  # prompts of the probe, half of a run's


class Warned(logging.Handler):
    """What a user reads as warnings, of this package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def briefly() -> dict[str, list[dict]]:
    """The products without their instruction and the system prompt of the model's chat template."""
    system = {"role": "system", "content": ""}
    asked = {n: [system, {"role": "user", "content": f"{n} * 7"}] for n in range(2, 10)}
    rows = [{"prompt": prompt, "answer": str(7 * n)} for n, prompt in asked.items()]
    return {"train": rows, "test": rows}


def varied(completions, **kwargs) -> list[float]:
    """A reward that differs within every group, so that each step has a gradient."""
    return [float(i % 2) for i in range(len(completions))]


def train(folder: Path, base_format: str, noise: str, model: str) -> dict:
    given = {
        **OPTIONS,
        "base_format": base_format,
        "aqn": noise,
        "model_name_or_path": model,
        "output_dir": str(folder),
    }
    words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    task = Task.read(TASK)
    task.dataset_name, task.reward_funcs, task.reward_weights = briefly, [varied], None
    script = Script.parse(task, "smollm2", words)
    warned = Warned()
    logging.getLogger("qerl_trl").addHandler(warned)
    trainer = QeRLGRPOTrainer(**script.trainer_arguments())
    _ALIVE.append(trainer)
    script.train(trainer)
    logging.getLogger("qerl_trl").removeHandler(warned)
    return {"warned": warned.said, "probe": vars(trainer.vllm_generation.probe_result)}


if __name__ == "__main__":
    probe.PROMPTS = PROBED
    folder, *rest = sys.argv[1:]
    arms = [rest[i : i + 3] for i in range(0, len(rest), 3)]
    print("RESULTS", json.dumps([train(Path(folder) / f"{arm[0]}-{arm[1]}", *arm) for arm in arms]), flush=True)
    os._exit(0)  # an engine never quite leaves a process
