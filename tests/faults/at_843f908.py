"""What passed silently at 843f908, tried by doors that exist there and here: trainers, `from_pretrained`, the command line.

    git worktree add /tmp/old 843f908
    python -m tests.faults.at_843f908 /tmp/old . --output tests/faults/at_843f908.json

Each case runs in each checkout, in a process of its own that imports that checkout's package, on the embedded tiny model. Its verdict there:
"silent" (the product is there, and wrong), "told" (a message of an error that the package raises on purpose) or "crashed" (another error).
What needs an engine, the Hub's stand-in or internals of today's package is not tried there; the table of `catalog --items` says which.
"""

import argparse
import contextlib
import importlib
import io
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parents[2] / "examples/assets/tiny-qwen2"
SECRET = "kx93-vv02-a-token-of-no-known-form"
CASES: dict[str, Callable[[Path], Any]] = {}


def case(fault: str) -> Callable:
    """Registers what injects `fault`: called with an empty folder, it asserts that the wrong product is there."""

    def register(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
        CASES[f"{fault}:{function.__name__}"] = function
        return function

    return register


# --- the doors --------------------------------------------------------------------------------------------------------------------


def reward(completions, **kwargs):
    return [float(sum(text.encode()) % 7) for text in completions]


def trainer(folder: Path, reward=reward, prompts=("say one ", "say two "), model=MODEL, **options):
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
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    data = Dataset.from_dict({"prompt": list(prompts) * 8})
    return QeRLGRPOTrainer(str(model), reward, args, data, processing_class=tokenizer, peft_config=lora)


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


def copied(folder: Path, source: Path = MODEL) -> Path:
    return Path(shutil.copytree(source, folder))


def edited(folder: Path, change: Callable[[dict], Any], name: str = "model.safetensors") -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, {"format": "pt"})
    return folder


def poison(tensors: dict) -> None:
    next(iter(tensors.values())).view(-1)[0] = float("nan")


# --- the cases --------------------------------------------------------------------------------------------------------------------


@case("S.model_folder_edited")
def edited_config_is_loaded(folder):
    from qerl_trl import from_pretrained

    command("quantize", MODEL, folder / "model")
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    from_pretrained(folder / "model")


@case("S.dense_tensor_nan")
def model_of_nan_is_quantized(folder):
    def norm(tensors: dict) -> None:
        tensors["model.norm.weight"][0] = float("nan")

    command("quantize", edited(copied(folder / "model"), norm), folder / "out")
    assert (folder / "out/model.safetensors").is_file()


def with_header(folder: Path, change: Callable[[dict], None]) -> Path:
    file = copied(folder) / "model.safetensors"
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return folder


@case("S.negative_offsets")
def overlapping_offsets_are_quantized(folder):
    def overlap(header: dict) -> None:
        names = sorted((n for n in header if n != "__metadata__"), key=lambda name: header[name]["data_offsets"])
        first, second = (header[name]["data_offsets"] for name in names[:2])
        second[0], second[1] = second[0] - 32, second[1] - 32
        assert first[1] > second[0]

    command("quantize", with_header(folder / "model", overlap), folder / "out")
    assert (folder / "out/model.safetensors").is_file()


@case("S.path_leads_out")
def linked_weights_are_quantized(folder):
    other = copied(folder / "other")
    (copied(folder / "model") / "model.safetensors").unlink()
    (folder / "model/model.safetensors").symlink_to(other / "model.safetensors")
    command("quantize", folder / "model", folder / "out")
    assert (folder / "out/model.safetensors").is_file()


@case("S.token_in_uploads")
def arguments_file(folder):
    trained(folder / "run", model_init_kwargs={"dtype": "float32", "token": SECRET})
    assert SECRET.encode() in (folder / "run/checkpoint-1/training_args.bin").read_bytes()


@case("S.run_folder_edited")
def adapter_of_nan_is_merged(folder):
    a_run(folder / "run")
    edited(folder / "run", poison, "adapter_model.safetensors")
    command("merge", folder / "run", folder / "out")
    assert (folder / "out/model.safetensors").is_file()


@case("S.run_folder_edited")
def half_an_adapter_is_merged(folder):
    a_run(folder / "run")
    edited(folder / "run", lambda t: [t.pop(name) for name in sorted(t)[::2]], "adapter_model.safetensors")
    command("merge", folder / "run", folder / "out")
    assert (folder / "out/model.safetensors").is_file()


def other_base(folder: Path) -> Path:
    def exchange(tensors: dict) -> None:
        weight = next(tensor for name, tensor in tensors.items() if "up_proj" in name)
        weight[[0, 1]] = weight[[1, 0]].clone()

    return edited(copied(folder), exchange)


@case("S.wrong_base")
def merge_of_another_base(folder):
    a_run(folder / "run")
    command("merge", folder / "run", folder / "out", "--base-model", other_base(folder / "other"))
    assert (folder / "out/model.safetensors").is_file()


@case("S.wrong_base")
def resume_on_another_base(folder):
    a_run(folder / "run")
    made = resumed(folder / "run", model=other_base(folder / "other"), max_steps=2)
    assert made.state.global_step == 2


@case("S.arms_share_folder")
def bf16_arm_takes_the_folder(folder):
    a_run(folder / "run")
    made = resumed(folder / "run", base_format="bf16", aqn=False, max_steps=2)
    assert made.state.global_step == 2


@case("S.finished_run_again")
def finished_run_trains_on(folder):
    a_run(folder / "run")
    assert resumed(folder / "run").state.global_step == 2


@case("S.reward_1e20")
def reward_without_advantages(folder):
    made = trained(folder / "run", reward=lambda completions, **_: [1e38 * (-1) ** i for i in range(len(completions))])
    assert made.state.global_step == 1


@case("S.resume_other_data")
def resume_with_other_data(folder):
    a_run(folder / "run")
    assert resumed(folder / "run", prompts=("count ", "to ten "), max_steps=2).state.global_step == 2


def longer_reward(completions, **kwargs):
    return [float(len(text)) for text in completions]


@case("S.resume_other_data")
def resume_with_another_reward(folder):
    a_run(folder / "run")
    assert resumed(folder / "run", reward=longer_reward, max_steps=2).state.global_step == 2


@case("S.prompt_longer_than_model")
def prompt_longer_than_the_model(folder):
    assert trained(folder / "run", prompts=("say " * 600,)).state.global_step == 1


@case("S.damaged_manifest")
def manifest_whose_files_are_a_list(folder):
    trained(folder / "run", max_steps=2)
    (folder / "run/checkpoint-2/qerl_manifest.json").write_text('{"files": []}')
    assert resumed(folder / "run", max_steps=2).state.global_step != 2  # it falls back, and goes on


# --- running them -----------------------------------------------------------------------------------------------------------------


def verdict(name: str) -> dict[str, str]:
    """In this process, with the package that it imports."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            CASES[name](Path(folder).resolve())
        except (ValueError, RuntimeError, OSError) as error:
            return {"verdict": "told", "said": f"{type(error).__name__}: {error}".replace(folder, "FOLDER")[:300]}
        except AssertionError:
            return {"verdict": "right"}
        except Exception as error:
            return {"verdict": "crashed", "said": f"{type(error).__name__}: {error}".replace(folder, "FOLDER")[:300]}
    return {"verdict": "silent"}


def in_checkout(checkout: Path, names: list[str]) -> dict[str, Any]:
    paths = os.pathsep.join(str(checkout / part) for part in ("src", "kernels/torch-ext"))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    found = {}
    process = subprocess.Popen(
        [sys.executable, __file__, "--here", *names],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        name, outcome = json.loads(line)
        found[name] = outcome
        print(name, outcome["verdict"], file=sys.stderr, flush=True)
    if process.wait() or len(found) < len(names):
        print(f"only {len(found)} of {len(names)} cases ended: start again for the others", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="checkouts; with --here, cases")
    parser.add_argument("--here", action="store_true", help="run the cases with the package that this process imports")
    parser.add_argument(
        "--output",
        type=Path,
        help="JSON file, to which the checkouts are added by their commits; cases that it has are not run again",
    )
    given = parser.parse_args()
    if given.here:
        for name in given.words or CASES:
            print(json.dumps([name, verdict(name)]), flush=True)
        shutil.rmtree(Path(tempfile.gettempdir()) / f"run-of-{os.getpid()}", ignore_errors=True)
        return
    record = json.loads(given.output.read_text()) if given.output and given.output.is_file() else {}
    for checkout in map(Path, given.words):
        asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        done = record.setdefault(commit, {})
        done |= in_checkout(checkout.resolve(), [name for name in CASES if name not in done])
        text = json.dumps(record, indent=1) + "\n"
        given.output.write_text(text) if given.output else print(text)


if __name__ == "__main__":
    main()
