"""The doors by which faults are tried in another checkout: trainers, `from_pretrained`, the command line, the example, on the embedded model.

Only what exists at 843f908 and today; whatever is imported of the package is imported inside, from the checkout that the process runs with.
"""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.hub_server import TOKEN, StandInHub

MODEL = Path(__file__).resolve().parents[2] / "examples/assets/tiny-qwen2"
SECRET = "kx93-vv02-a-token-of-no-known-form"
#: "fault:name of the case" -> what injects it
CASES: dict[str, Callable[[Path], Any]] = {}
#: the cases that publish: their process has a stand-in for the Hub
PUBLISHING: set[str] = set()


#: what `the_hub` gives, in the process of those
_hub: list[StandInHub] = []


class Lost(Exception):
    """What was there before, or was measured, is gone."""


class NoCause(Exception):
    """It ended with an error that does not say what to do."""


def case(fault: str, publishes: bool = False) -> Callable:
    """Registers what injects `fault`: called with an empty folder, it asserts that the wrong product is there."""

    def register(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        name = f"{fault}:{function.__name__}"
        CASES[name] = function
        if publishes:
            PUBLISHING.add(name)
        return function

    return register


def start_hub() -> None:
    """Before anything of the Hub's library is imported: it reads its addresses then."""
    _hub.append(StandInHub())
    os.environ.update(HF_ENDPOINT=_hub[0].endpoint, HF_HUB_OFFLINE="0", HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1")


def the_hub() -> StandInHub:
    """The stand-in, without faults and repositories of another case."""
    server = _hub[0]
    server.fail = {}
    server.repos.clear()
    return server


def is_no_door(error: Exception) -> bool:
    """Whether the checkout has no module of that name."""
    return isinstance(error, ImportError) and (error.name or "").startswith("qerl_trl")


@contextmanager
def ends_without(*remedies: str) -> Iterator[None]:
    """The block raises, and its message has none of the words by which somebody would know what to change.

    Raises:
        `NoCause`: so it is. `AssertionError`: it has one of them, or nothing was raised.
    """
    try:
        yield
    except Exception as error:
        if is_no_door(error):
            raise
        said = f"{type(error).__name__}: {error}"
        assert not any(word in said for word in remedies), said
        raise NoCause(said) from error
    raise AssertionError("nothing was raised")


# --- the doors --------------------------------------------------------------------------------------------------------------------


def reward(completions, **kwargs):
    return [float(sum(text.encode()) % 7) for text in completions]


def trainer(
    folder: Path,
    reward=reward,
    prompts=("say one ", "say two "),
    model=MODEL,
    targets=("q_proj", "down_proj"),
    rollout_func=None,
    lora=(),
    tokenizer=(),
    **options,
):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer

    given: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 1,
        "max_completion_length": 4, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3, "report_to": "none",
        "gradient_checkpointing": False, "disable_tqdm": True, "aqn_num_stages": 2, "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    args = QeRLConfig(**{**given, **options})
    adapted = targets if isinstance(targets, str) else list(targets)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=adapted, task_type="CAUSAL_LM", **dict(lora))
    processing_class = AutoTokenizer.from_pretrained(MODEL, padding_side="left", **dict(tokenizer))
    data = Dataset.from_dict({"prompt": list(prompts) * 8})
    return QeRLGRPOTrainer(
        str(model),
        reward,
        args,
        data,
        processing_class=processing_class,
        peft_config=adapter,
        rollout_func=rollout_func,
    )


def trained(folder: Path, **options):
    made = trainer(folder, **options)
    made.train()
    made.save_model()
    return made


def a_run(folder: Path) -> Path:
    """What a run of one step leaves behind, as a copy: it is trained once."""
    original = Path(tempfile.gettempdir()) / f"run-of-{os.getpid()}"
    if not original.is_dir():
        trained(original)
    return copied(folder, original)


def resumed(folder: Path, **options):
    """As the example does it: from the newest whole checkpoint."""
    from qerl_trl import last_checkpoint

    made = trainer(folder, **options)
    made.train(resume_from_checkpoint=last_checkpoint(folder))
    return made


def command(*words: object) -> None:
    """`qerl-trl`; an error is raised."""
    from typer.testing import CliRunner

    try:
        cli = importlib.import_module("qerl_trl.cli.main")
    except ImportError:
        cli = importlib.import_module("qerl_trl.cli")
    outcome = CliRunner().invoke(cli.app, [str(word) for word in words])
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    assert outcome.exit_code == 0, outcome.output


def package() -> str:
    """The file of the checkout's package."""
    import qerl_trl

    return str(qerl_trl.__file__)


def example(output_dir: Path, **options: object) -> None:
    """The checkout's own example, one small step on the embedded model, as a user starts it.

    Raises:
        `RuntimeError`: it failed; with the last line that it said.
    """
    script = Path(package()).parents[2] / "examples/grpo_gsm8k.py"
    small = {
        "config": script.parent / "configs/embedded.yaml", "max_steps": 1, "per_device_train_batch_size": 16, "max_completion_length": 8,
        "eval_problems": 6, "lora_r": 4, "output_dir": output_dir,
    }  # fmt: skip
    words = [str(part) for name, value in {**small, **options}.items() for part in (f"--{name}", value)]
    ended = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().splitlines()[-1])


def copied(folder: Path, source: Path = MODEL) -> Path:
    return Path(shutil.copytree(source, folder))


def edited(folder: Path, change: Callable[[dict], Any], name: str = "model.safetensors") -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, {"format": "pt"})
    return folder


def full_disk(*args, **kwargs):
    raise OSError(28, "No space left on device")


def poison(tensors: dict) -> None:
    next(iter(tensors.values())).view(-1)[0] = float("nan")


def other_base(folder: Path) -> Path:
    def exchange(tensors: dict) -> None:
        weight = next(tensor for name, tensor in tensors.items() if "up_proj" in name)
        weight[[0, 1]] = weight[[1, 0]].clone()

    return edited(copied(folder), exchange)
