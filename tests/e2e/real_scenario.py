"""Two steps of GRPO on a real model on 4 bits in bf16, with noise, the recipe of `make demo-real` and real vLLM.

python real_scenario.py FOLDER MODEL
"""

# ruff: noqa: E402  (vLLM reads its environment when it is imported)

import json
import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from tests.e2e.engine.environment import DEFAULTS

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)

from qerl_trl import QeRLGRPOTrainer, Script, Task
from qerl_trl.rollout import probe
from tests.e2e.engine.engines import MEMORY

# short, because bf16 is slow on a CPU without instructions for it (5 GFLOP/s per core)
ENGINE = {"use_vllm": "true", "vllm_mode": "colocate", "vllm_max_model_length": 64}
ENGINE |= {"vllm_gpu_memory_utilization": MEMORY["gpu_memory_utilization"]}
ENGINE |= {"vllm_engine_kwargs": json.dumps({"enforce_eager": True, **MEMORY})}
STEPS = {"dtype": "bfloat16", "base_format": "nvfp4", "aqn": "true", "aqn_num_stages": 2, "max_steps": 2}
STEPS |= {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4, "temperature": 1.5}
STEPS |= {"learning_rate": 1e-3, "eval_problems": 1, "disable_tqdm": "true"}
PROBED = 2  # prompts of the probe


class Warnings(logging.Handler):
    """Warnings of this package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def problems() -> dict[str, list[dict]]:
    """Products without the task's instruction and the system prompt of the model's chat template."""
    system = {"role": "system", "content": ""}
    prompts = {n: [system, {"role": "user", "content": f"{n} * 7"}] for n in range(2, 10)}
    rows = [{"prompt": prompt, "answer": str(7 * n)} for n, prompt in prompts.items()]
    return {"train": rows, "test": rows}


def varied(completions, **kwargs) -> list[float]:
    """A reward that differs within every group, so that each step has a gradient."""
    return [float(i % 2) for i in range(len(completions))]


def main(folder: str, model: str) -> None:
    given = {**ENGINE, **STEPS, "model_name_or_path": model, "output_dir": folder}
    task = Task.read(ROOT / "examples" / "tasks" / "products.yaml")
    task.dataset_name, task.reward_funcs, task.reward_weights = problems, [varied], None
    script = Script.parse(
        task, "smollm2", [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    )
    warnings = Warnings()
    logging.getLogger("qerl_trl").addHandler(warnings)
    trainer = QeRLGRPOTrainer(**script.trainer_arguments())
    script.train(trainer)
    generation = trainer.vllm_generation
    found = {"probe": vars(generation.probe_result), "noise": vars(generation.noise_result)}
    print("RESULTS", json.dumps({"warnings": warnings.texts, **found}), flush=True)
    os._exit(0)  # an engine does not always let go of its threads


if __name__ == "__main__":
    probe.PROMPTS = PROBED
    main(*sys.argv[1:])
