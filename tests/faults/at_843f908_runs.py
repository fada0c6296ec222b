"""The cases of at_843f908.py that need the inside of a run, its example or the Hub."""

import hashlib
import importlib.util
import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from tests.faults import doors
from tests.faults.doors import (
    SECRET,
    Lost,
    a_run,
    case,
    command,
    copied,
    edited,
    ends_without,
    example,
    full_disk,
    other_base,
    reward,
    trained,
    trainer,
)
from tests.hub_server import TOKEN

#: on the stand-in for the Hub
REPO = "tester/model"


# --- inside a run -----------------------------------------------------------------------------------------------------------------


@case("S.entropy_open_loop")
def sigma_winds_up_although_nothing_is_learned(folder):
    """The entropy that it is steered by is that of the clean policy, which is the same at every step."""
    made = trainer(
        folder / "run", aqn_schedule="entropy_target", aqn_entropy_target=8.0, aqn_sigma_start=0.4, aqn_sigma_end=5e-4, learning_rate=0.0,
        max_steps=12, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    made.train()
    found = [entry["aqn/sigma"] for entry in made.state.log_history if "aqn/sigma" in entry]
    assert found[0] < 0.02 and found[-1] > 0.39, found


@case("S.noise_uncorrected_in_transformers")
def no_ratio_enters_the_loss(folder):
    made, seen = trainer(folder / "run", aqn_schedule="constant", aqn_sigma_start=0.01), []
    score = made._generate_and_score_completions

    def scored(inputs):
        seen.append(score(inputs))
        return seen[-1]

    made._generate_and_score_completions = scored
    made.train()
    assert seen and made.aqn is not None and not [name for output in seen for name in output if "importance" in name]


def hanging(ended: threading.Event):
    def hang(completions, **kwargs):
        ended.wait(10)
        return reward(completions)

    return hang


def limit() -> dict[str, float]:
    from qerl_trl import QeRLConfig

    return {"reward_timeout": 1.0} if "reward_timeout" in QeRLConfig.__dataclass_fields__ else {}


@case("R5.hangs")
def reward_is_waited_for(folder):
    trained(folder / "run", reward=hanging(threading.Event()), **limit())


@case("S.reward_hangs")
def async_reward_is_waited_for(folder):
    ended = threading.Event()

    async def hang(completions, **kwargs):
        return hanging(ended)(completions)

    trained(folder / "run", reward=hang, **limit())


def graded_lazily(completions, **kwargs):
    def grade(text: str) -> float:
        time.sleep(1)
        return float(len(text))

    return (grade(text) for text in completions)


@case("S.reward_hangs")
def lazy_reward_is_waited_for(folder):
    assert trained(folder, reward=graded_lazily, **dict.fromkeys(limit(), 0.5)).state.global_step == 1


@case("R5.huge")
def weights_are_infinite(folder):
    import torch

    made = trained(
        folder / "run", reward=lambda completions, **_: [1e30 * (-1) ** i for i in range(len(completions))], scale_rewards="none",
        max_grad_norm=0.0,
    )  # fmt: skip
    assert not all(torch.isfinite(p).all() for p in made.model.parameters() if p.requires_grad)


@case("R8.two_runs_one_folder")
def second_process_trains_in_the_folder(folder):
    made = trainer(folder / "run")
    code = f"from pathlib import Path; from tests.faults.doors import trained; trained(Path({str(folder / 'run')!r}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "RuntimeError" in ended.stderr:
        raise RuntimeError(ended.stderr.splitlines()[-1])
    assert ended.returncode == 0, ended.stderr
    made.train()


@case("R8.out_of_memory_in_step")
def memory_runs_out_in_a_step(folder):
    import torch

    made = trainer(folder / "run")

    def short(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    made.compute_loss = short
    with ends_without("per_device_train_batch_size", "gradient_checkpointing", "max_completion_length"):
        made.train()


@case("R8.out_of_memory_at_start")
def memory_runs_out_while_loading(folder):
    import torch
    from transformers import PreTrainedModel

    def short(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    load = PreTrainedModel.__dict__["from_pretrained"]
    PreTrainedModel.from_pretrained = short
    try:
        with ends_without("base_format", "smaller", "qerl-trl", "free"):
            trainer(folder / "run")
    finally:
        PreTrainedModel.from_pretrained = load


@case("R8.disk_full")
def disk_is_full_at_a_checkpoint(folder):
    import torch

    made, save = trainer(folder / "run"), torch.save
    torch.save = full_disk
    try:
        with ends_without("output_dir", "save_total_limit", "Free"):
            made.train()
    finally:
        torch.save = save


@contextmanager
def without_vllm():
    """No module of vLLM is loaded inside."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}
    try:
        yield
    finally:
        sys.modules.pop("vllm", None)
        sys.modules.update(hidden)


@case("R1.vllm_missing")
def vllm_is_not_there(folder):
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *a: None if name == "vllm" else find(name, *a)
    try:
        with without_vllm(), ends_without("pip install"):
            sys.modules["vllm"] = None  # type: ignore[assignment]  # so that its import fails
            trainer(folder / "run", use_vllm=True, vllm_mode="colocate")
    finally:
        importlib.util.find_spec = find


@case("R1.vllm_abi")
def vllm_is_of_another_torch(folder):
    (folder / "vllm").mkdir()
    (folder / "vllm/__init__.py").write_text("raise ImportError('vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda')")
    sys.path.insert(0, str(folder))
    try:
        with without_vllm(), ends_without("pip install", "another PyTorch", "doctor"):
            trainer(folder / "run", use_vllm=True, vllm_mode="colocate")
    finally:
        sys.path.remove(str(folder))


# --- on disk and on the Hub -------------------------------------------------------------------------------------------------------


@case("S.odd_header")
def integer_buffer_is_refused_without_a_cause(folder):
    import torch

    edited(copied(folder / "model"), lambda tensors: tensors.update({"model.steps": torch.arange(4)}))
    with ends_without("model.steps"):
        command("quantize", folder / "model", folder / "out")


@case("R7.other_revision")
def main_is_merged_and_not_what_was_trained(folder):
    """A repository of two revisions in the Hub's cache: the run names the first, and the adapter is merged into the second."""
    from huggingface_hub import constants
    from safetensors.torch import load_file

    cache = Path(constants.HF_HUB_CACHE) / "models--someone--base"
    copied(cache / f"snapshots/{'a' * 40}")
    other_base(cache / f"snapshots/{'b' * 40}")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("b" * 40)
    trained(folder / "run", model="someone/base", model_init_kwargs={"dtype": "float32", "revision": "a" * 40})
    command("merge", folder / "run", folder / "out")
    first, second, merged = (
        load_file(path / "model.safetensors")
        for path in (cache / f"snapshots/{'a' * 40}", cache / f"snapshots/{'b' * 40}", folder / "out")
    )
    name = next(name for name in first if "up_proj" in name)  # without an adapter
    far, near = ((merged[name][:2].float() - base[name][:2].float()).norm() for base in (first, second))
    assert near < 0.5 * far


@case("R7.merged_twice")
def model_that_has_the_adapter_is_merged_again(folder):
    a_run(folder / "run")
    command("merge", folder / "run", folder / "once", "--dtype", "float32")
    command("merge", folder / "run", folder / "twice", "--base-model", folder / "once")
    assert (folder / "twice/model.safetensors").is_file()


@case("R7.token")
def token_stands_in_the_results(folder):
    example(folder / "run", hub_token=SECRET)
    assert SECRET in (folder / "run/results.json").read_text()


@case("S.other_eval_problems")
def results_of_another_held_out_set_are_lost(folder):
    run = folder / "run"
    example(run)
    first = (run / "results.json").read_text()
    try:
        example(run, eval_problems=4, max_steps=2)
    except RuntimeError as error:
        if (run / "checkpoint-2").is_dir() and (run / "results.json").read_text() == first:
            raise Lost(f"the results of two steps: {error}") from error
        raise


@case("S.results_lost_to_hub", publishes=True)
def results_are_lost_to_a_hub_that_refuses(folder):
    doors.the_hub().fail = {r".*/commit/.*": 403}
    options = {"push_to_hub": "true", "hub_model_id": REPO, "hub_token": TOKEN, "hub_strategy": "end"}
    try:
        example(folder / "run", **options)
    except RuntimeError as error:
        if list((folder / "run").glob("checkpoint-*")) and not (folder / "run/results.json").is_file():
            raise Lost(f"the results: {error}") from error
        raise


@case("S.push_while_training_fails", publishes=True)
def pushes_fail_and_the_run_succeeds(folder):
    server = doors.the_hub()
    server.fail = {r".*/commit/.*": 403}
    made = trainer(
        folder / "run", push_to_hub=True, hub_model_id=REPO, hub_token=TOKEN, hub_strategy="every_save", hub_always_push=True, max_steps=2,
        **({"hub_base_model": "someone/base"} if "hub_base_model" in field_names() else {}),
    )  # fmt: skip
    made.train()
    assert made.state.global_step == 2
    assert not [name for name in server.repos[REPO]["files"] if name.endswith(".safetensors")]


def field_names() -> set[str]:
    from qerl_trl import QeRLConfig

    return set(QeRLConfig.__dataclass_fields__)


@case("S.manifest_names_outside", publishes=True)
def file_outside_of_the_folder_is_uploaded(folder):
    server = doors.the_hub()
    a_run(folder / "run")
    command("merge", folder / "run", folder / "out")
    private = folder / "private.json"
    private.write_text("what was never meant to be published")
    manifest = json.loads((folder / "out/qerl_manifest.json").read_text())
    manifest["files"][str(private)] = {
        "bytes": private.stat().st_size, "sha256": hashlib.sha256(private.read_bytes()).hexdigest()
    }  # fmt: skip
    (folder / "out/qerl_manifest.json").write_text(json.dumps(manifest))
    command("push", "merged", folder / "out", REPO)
    found = server.repos[REPO]["files"].values()
    assert any(b"never meant" in content for content in found)
