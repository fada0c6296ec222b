"""The command line: instant help, exit codes, JSON, and each command on small models."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from qerl_trl import QeRLConfig
from qerl_trl.checkpoint import seal
from qerl_trl.checkpoint.fingerprint import base_sha256
from qerl_trl.checks import environment
from qerl_trl.cli import doctor
from qerl_trl.cli import main as cli
from qerl_trl.cli import train as options
from qerl_trl.publish import export, hub
from qerl_trl.publish.export import logits_of
from qerl_trl.publish.load import TrainedPolicy, load_policy
from qerl_trl.tasks import evaluation
from tests.faults.tiny_runs import call
from tests.publish.test_export import IDS, make_policy
from tests.publish.test_hub import REPO

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("quantize", "merge", "push", "train", "arms", "eval", "plan", "tune", "doctor")


@pytest.fixture(scope="module")
def run(tiny_model_dir, tiny_tokenizer, tmp_path_factory):
    """What a finished run leaves: an adapter with its settings, results.json."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    policy = make_policy(tiny_model_dir("qwen2"), size=0.2)
    settings = {"base_format": "nvfp4", "scale_rule": "rtn", "dtype": "float32", "model": str(tiny_model_dir("qwen2"))}
    settings |= {"settings_sha256": "5e77", "global_step": 2}
    export.save_adapter(TrainedPolicy(policy, tiny_tokenizer, settings), folder)
    results = {
        "after": {"accuracy": 0.5, "interval95": [0.4, 0.6], "total": 10, "correct": 5},
        "log_history": [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.3}],
        "dataset": "someone/data",
        "settings": settings,
        "steps": 2,
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder, policy


def test_help_is_instant():
    best = 9.0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run(
            [sys.executable, "-m", "qerl_trl.cli.main", "--help"], check=True, capture_output=True, text=True
        ).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)  # not the machine's load
    assert best < 0.5
    assert all(f"  {command} " in out for command in COMMANDS)


def test_help_imports_nothing_heavy():
    code = "import sys; from qerl_trl import cli; print([m for m in ('torch', 'transformers', 'huggingface_hub', 'jinja2') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "[]"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert len(out.split("Usage")[1]) > 200


def test_exit_codes_and_messages(tmp_path):
    command = [sys.executable, "-m", "qerl_trl.cli.main", "quantize", str(tmp_path / "absent"), str(tmp_path / "out")]
    failed = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_TOKEN": "hf_Hidden123"})
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr.startswith("qerl-trl: ")
    assert "neither a folder here nor a Hub id" in failed.stderr
    assert "Traceback" not in failed.stderr and "hf_Hidden123" not in failed.stderr


@pytest.mark.parametrize("command", ["plan", "eval"])
def test_a_model_that_is_nowhere_is_named(command, monkeypatch):
    """Both said something about the form of a repository's name, or about a connection, and not which model."""
    code, _, err = call(command, "./runs/typo")
    assert code == 2 and "./runs/typo is neither a folder here nor a Hub id (user/name)" in err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = call(command, "runs/typo")
    assert code == 1 and "runs/typo cannot be loaded: " in err
    enough = "config.json" if command == "plan" else "its files"
    assert f"Without a network, name a folder with {enough}." in err


def test_push_of_a_folder_that_is_not_there(tmp_path):
    code, _, err = call("push", "adapter", tmp_path / "typo", "user/name")
    assert code == 2 and "typo has neither config.json nor adapter_config.json. Name a model, a checkpoint" in err


def test_eval_takes_the_gpu_where_there_is_one(monkeypatch):
    """It took the CPU without a word."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("qerl_trl.publish.load.load_any", lambda model, device, *rest: asked.append(device) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call("eval", "user/model")
    assert asked == ["cuda"]


def test_quantize_imports_no_bitsandbytes(tiny_model_dir, tmp_path):
    """One that cannot be imported, or that contacts the Hub at import, must not stand in the way of who never asked for it."""
    (tmp_path / "bitsandbytes.py").write_text("raise SystemError('bitsandbytes was imported')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [
        sys.executable,
        "-m",
        "qerl_trl.cli.main",
        "quantize",
        str(tiny_model_dir("qwen2")),
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/README.md").is_file()


def test_the_token_is_cut_out_of_any_error(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_Hidden123")
    cli.tell("server said hf_Hidden123")
    assert capsys.readouterr().err == "qerl-trl: server said <secret>\n"


def test_quantize(tiny_model_dir, tmp_path):
    code, out, err = call(
        "quantize",
        tiny_model_dir("llama"),
        tmp_path / "out",
        "--json",
        "--scale-rule",
        "four_over_six",
        "--skip",
        "down_proj",
    )
    assert code == 0, err
    result = json.loads(out)
    assert result["layers"] == 12
    assert 0.004 < result["nmse"] < 0.012
    assert "model.layers.0.mlp.down_proj" in result["not_quantized"]
    card = (tmp_path / "out/README.md").read_text()
    assert f"{result['weights']:,} in 12 layers" in card
    code, _, err = call("quantize", tiny_model_dir("qwen2"), tmp_path / "out")
    assert code == 2 and "--overwrite" in err


def test_four_commands_publish_a_run(run, tiny_model_dir, tmp_path):
    """Adapter, merged model, NVFP4 base and its other readers; each gives the policy's own greedy tokens."""
    folder, policy = run
    expected = torch.cat(logits_of(policy, [IDS])).argmax(-1)
    prompts = tmp_path / "held_out.jsonl"
    prompts.write_text("\n".join(json.dumps({"question": f"what is {i}?", "answer": f"#### {i}"}) for i in range(4)))
    code, out, err = call("merge", folder, tmp_path / "merged", "--prompts", prompts, "--json")
    assert code == 0, err
    measured = json.loads(out)["measured"]
    assert 0 < measured["mean_logit_distance"] < 0.05
    assert measured["kl_nats_per_token"] < 1e-4
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (torch.cat(logits_of(merged, [IDS])).argmax(-1) == expected).float().mean() > 0.98
    card = (tmp_path / "merged/README.md").read_text()
    assert "value: 50.0" in card and "someone/data" in card
    for form, kind in (("adapter", "adapter"), ("base", "nvfp4_base"), ("nvfp4", "nvfp4_merged")):
        code, out, err = call("merge", folder, tmp_path / form, "--as", form, "--json")
        assert code == 0, err
        assert json.loads(out)["kind"] == kind
        assert (tmp_path / form / "README.md").is_file()
        assert (tmp_path / form / "tokenizer.json").is_file()
    again = load_policy(tmp_path / "adapter", base_model=str(tiny_model_dir("qwen2")))
    assert torch.equal(torch.cat(logits_of(again.model, [IDS])).argmax(-1), expected)
    on_published_base = load_policy(tmp_path / "adapter", base_model=str(tmp_path / "base"), dtype="float32")
    assert torch.equal(torch.cat(logits_of(on_published_base.model, [IDS])), torch.cat(logits_of(policy, [IDS])))


def test_a_merge_is_measured_on_the_tasks_held_out_problems(run, tmp_path):
    folder, _ = run
    rows = [{"question": f"what is {i}?", "answer": f"#### {i}"} for i in range(4)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = tmp_path / "task.yaml"
    task.write_text("dataset_name: held_out.jsonl\ntest_split_size: 2\n")
    code, out, err = call("merge", folder, tmp_path / "merged", "--task", task, "--json")
    assert code == 0, err
    assert 0 < json.loads(out)["measured"]["tokens"] < 100


def test_a_destination_that_is_taken_is_refused_before_a_base_is_loaded(run, tmp_path, monkeypatch):
    """It was refused at the end, after the minutes that a large base takes."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert call("merge", run[0], tmp_path / "adapter", "--as", "adapter")[0] == 0
    monkeypatch.setattr("qerl_trl.publish.load.load_policy", lambda *args, **kwargs: 1 / 0)
    for name, words in (("full", ()), ("adapter", ()), ("adapter", ("--as", "base"))):
        code, _, err = call("merge", run[0], tmp_path / name, *words)
        assert code == 2 and f"{name} already exists" in err
    with pytest.raises(ZeroDivisionError):
        call("merge", run[0], tmp_path / "adapter", "--overwrite")


def test_merging_onto_the_original_base_is_another_model_and_measured(run, tmp_path):
    folder, _ = run
    code, _, err = call("merge", folder, tmp_path / "other", "--onto-original")
    assert code == 2 and "--prompts" in err
    prompts = tmp_path / "held_out.jsonl"
    prompts.write_text(json.dumps({"question": "what?", "answer": "#### 2"}))
    code, out, err = call("merge", folder, tmp_path / "other", "--onto-original", "--prompts", prompts, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["kind"] == "merged_other_base"
    assert result["measured"]["kl_nats_per_token"] > 1e-5
    card = (tmp_path / "other/README.md").read_text()
    assert "Not the policy that was trained" in card
    assert f"{result['measured']['kl_nats_per_token']:.4g}" in card
    assert "model-index" not in card


def test_a_merge_that_keeps_nothing_needs_force(tiny_model_dir, tiny_tokenizer, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"), dtype="bfloat16", size=0.0005)
    settings = {"base_format": "nvfp4", "model": str(tiny_model_dir("qwen2"))}
    export.save_adapter(TrainedPolicy(policy, tiny_tokenizer, settings), tmp_path / "run")
    code, _, err = call("merge", tmp_path / "run", tmp_path / "out", "--as", "nvfp4")
    assert code == 2 and "survives rounding" in err and not (tmp_path / "out").exists()
    assert call("merge", tmp_path / "run", tmp_path / "out", "--as", "nvfp4", "--force")[0] == 0


def test_push(run, server, tmp_path):
    folder, _ = run
    code, _, err = call("push", "adapter", folder, REPO)
    assert code == 2 and "--base-model" in err and server.requests == []
    assert call("merge", folder, tmp_path / "merged")[0] == 0
    code, out, err = call("push", "merged", tmp_path / "merged", REPO, "--json")
    assert code == 0, err
    assert json.loads(out)["private"] is True
    assert "(private" in err
    assert "model.safetensors" in server.repos[REPO]["files"]
    assert call("push", "base", tmp_path / "merged", REPO)[0] == 2
    code, out, err = call("push", "adapter", folder, "tester/adapter", "--base-model", "someone/base", "--public")
    assert code == 0, err
    assert server.repos["tester/adapter"]["private"] is False
    assert "PUBLIC" in err
    server.fail = {".*": 403}
    code, _, err = call("push", "merged", tmp_path / "merged", REPO)
    assert code == 1 and "may not write" in err


def test_the_data_are_named_where_an_export_is_pushed(run, server, tmp_path):
    """`--dataset` was taken for a run's folder alone."""
    assert call("merge", run[0], tmp_path / "merged")[0] == 0
    code, _, err = call("push", "merged", tmp_path / "merged", REPO, "--dataset", "someone/other-data")
    assert code == 0, err
    assert "someone/other-data" in server.text(REPO)["README.md"]


def test_push_of_a_plain_checkpoint(tiny_model_dir, server, tmp_path):
    """A checkpoint as Trainer writes it, with files that nobody should publish."""
    policy = make_policy(tiny_model_dir("qwen2"))
    checkpoint_folder = tmp_path / "checkpoint-2"
    policy.save_pretrained(checkpoint_folder)
    (checkpoint_folder / "training_args.bin").write_bytes(b"pickle")
    (checkpoint_folder / "optimizer.pt").write_bytes(b"large")
    code, _, err = call("push", "adapter", checkpoint_folder, REPO, "--base-model", "someone/base")
    assert code == 0, err
    files = set(server.repos[REPO]["files"])
    assert "adapter_model.safetensors" in files
    assert not files & {"training_args.bin", "optimizer.pt"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpu-gib", -5), "--gpu-gib"),
        (("--base-format", "int4"), "--base-format"),
        (("--card", "T4"), "older than Ampere"),
        (("--batch", 0), "--batch"),
        (("--completion-length", 0), "--completion-length"),
        (("--lora-rank", 0), "--lora-rank"),
    ],
)
def test_a_plan_of_nonsense_is_refused_before_the_network(options, said):
    code, _, err = call("plan", "nobody/nothing", *options)
    assert code == 2 and said in err and "Hub" not in err


def test_plan(tiny_model_dir):
    folder = tiny_model_dir("llama")
    code, out, _ = call("plan", folder, "--gpu-gib", 24, "--no-vllm", "--json")
    result = json.loads(out)
    assert code == 0 and result["fits"] is True
    for phase in ("update", "rollout"):
        assert result[phase] == sum(part[phase] for part in result["parts"])
    assert result["peak"] == max(result["update"], result["rollout"])
    code, out, _ = call("plan", folder, "--gpu-gib", 3, "--batch", 32)
    assert code == 1
    assert "does not fit into 3.0 GiB" in out and "not one sequence of" in out and "per_device_train_batch_size" in out
    code, out, _ = call("plan", folder, "--config", "qwen2.5-7b", "--gpu-gib", 24)
    assert code == 0 and "128 completions run in 1 wave" in out and "optimizer, adamw_8bit" in out
    more = ("--base-format", "full", "--optimizer", "adamw_torch", "--completion-length", 2048, "--sleep")
    code, out, _ = call(
        "plan", folder, "--config", "qwen2.5-7b", *more, "--json"
    )  # the file's were planned, without a word
    work = json.loads(out)["work"]
    assert work["base_format"] == "full" and work["optimizer"] == "adamw_torch" and work["sleep"]
    assert work["completion_length"] == 2048 and work["completions"] == 128
    code, out, _ = call("plan", folder, "--config", "qwen2.5-7b", "--gpus", 4, "--json")
    one = json.loads(call("plan", folder, "--config", "qwen2.5-7b", "--json")[1])["work"]
    four = json.loads(out)["work"]
    assert four["processes"] == 4 and four["completions"] * 4 == one["completions"]
    assert four["batch"] * four["accumulation"] * 4 == one["batch"] * one["accumulation"]  # the same update
    assert "4 GPUs, the whole base on each" in call("plan", folder, "--gpus", 4)[1]
    code, _, err = call("plan", folder, "--config", "qwen2.5-7b", "--gpus", 3)
    assert code == 2 and "(128) must be divisible by the global batch size (12)" in err
    whole, sharded = (
        {
            part["name"]: part["update"]
            for part in json.loads(call("plan", folder, "--gpus", 2, *more, "--json")[1])["parts"]
        }
        for more in ((), ("--fsdp", "--tensor-parallel", 2))
    )
    adapter, copy = "adapter, rank 32", "the engine's copy of the weights"
    assert 2 * sharded[adapter] == whole[adapter]
    assert whole[copy] == 0 < sharded[copy] < whole["frozen base, nvfp4"]
    assert "2 GPUs, which share the base: 64 completions" in call("plan", folder, "--gpus", 2, "--fsdp")[1]
    assert "optimizer, adamw_torch_fused" in call("plan", "--config", "qwen2.5-7b", folder, "--gpus", 2, "--fsdp")[1]
    assert "give one, and how many with --gpus" in call("plan", folder, "--fsdp")[2]
    zero2 = json.loads(call("plan", folder, "--gpus", 2, "--zero2", "--json")[1])["work"]
    assert zero2["deepspeed"] and zero2["gradient_checkpointing"] and not zero2["sharded"]
    assert "two ways to share" in call("plan", folder, "--gpus", 2, "--zero2", "--fsdp")[2]
    assert call("plan", folder, "--config", "qwen9")[0] == 2
    assert call("plan")[2].startswith("There is nothing to plan")


def test_doctor(monkeypatch):
    monkeypatch.setattr(environment, "vllm_problems", lambda: [])  # imports vLLM: tests/faults/test_r1_environment.py
    code, out, _ = call("doctor", "--json")
    result = json.loads(out)
    assert result["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]  # metadata may omit "+cu130"
    assert code == (1 if any(problem["fatal"] for problem in result["problems"]) else 0)
    real = doctor.importlib.metadata.version
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "99.0" if name == "trl" else real(name))
    assert "Newer than this package was tested with: trl 99.0" in call("doctor")[1]  # a note, no refusal


def test_eval(run, tmp_path):
    folder, _ = run
    problems = tmp_path / "test.jsonl"
    problems.write_text("\n".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) for i in range(5)))
    options = [
        "--data",
        problems,
        "--max-new-tokens",
        4,
        "--limit",
        3,
        "--output",
        tmp_path / "eval.json",
    ]
    code, out, err = call("eval", folder, *options, "--json")
    assert code == 0, err
    result = json.loads((tmp_path / "eval.json").read_text())
    assert result["total"] == 3 and result["adapter"] is True and len(result["verdicts"]) == 3
    assert json.loads(out)["accuracy"] == result["accuracy"]
    # that nothing was in the form that counts was not said: 0 %, as of a model that knows nothing
    assert (result["answer_format"], result["without_an_answer"]) == ("marked", 3)
    code, out, _ = call("eval", folder, *options)
    assert "3 of 3 completions state no answer after #### or in a box" in out and "answer_format: whole" in out
    code, _, err = call("eval", folder, "--data", tmp_path / "typo.jsonl", "--output", tmp_path / "x.json")
    assert code == 2 and "typo.jsonl' is no file or folder in" in err and "Name a folder with <split>.jsonl" in err


def test_a_measurement_is_not_lost_and_a_part_is_not_the_model_s(run, tmp_path):
    """Hours were: to a folder of the result that was not there, and to a quick look with --limit, which the card showed from then on."""
    folder = shutil.copytree(run[0], tmp_path / "run")
    rows = [json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) for i in range(5)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    ask = ["eval", folder, "--max-new-tokens", 2, "--temperature", 0, "--data", tmp_path / "a.jsonl"]
    code, _, err = call(*ask, "--output", tmp_path / "results/of/today.json")
    assert code == 2 and "today.json cannot be written" in err
    assert call(*ask)[0] == 0
    before = (folder / "eval-local.json").read_bytes()
    assert call(*ask, "--limit", 2)[0] == 0
    assert (folder / "eval-local.json").read_bytes() == before
    assert call(*ask, "--limit", 2, "--output", tmp_path / "quick.json")[0] == 0
    assert json.loads((tmp_path / "quick.json").read_text())["total"] == 2
    for option in ("--limit", "--batch-size"):
        assert call(*ask, option, 0)[0] == 2


def test_references_that_cannot_be_compared_with_are_refused_before_anything_is_generated(run, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "2?", "answer": None}))
    monkeypatch.setattr("qerl_trl.tasks.evaluation.evaluate", lambda *a, **k: pytest.fail("it was measured"))
    code, _, err = call("eval", run[0], "--data", tmp_path / "a.jsonl")
    assert code == 2 and "Problem 0 (from 0): The reference None is no text and no number" in err


@pytest.mark.parametrize(("dataset", "told"), [(None, True), ("openai/gsm8k", False)])
def test_a_run_that_is_measured_on_another_benchmark_than_its_own_is_told(dataset, told, run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    (folder / "results.json").write_text(json.dumps({"task": "words", "dataset": dataset}))
    _, _, err = call("eval", folder)
    assert ("measured on its task, words. This measures gsm8k; --task" in err) is told


def test_eval_of_a_quantized_folder(tiny_model_dir, tiny_tokenizer, tmp_path):
    assert call("quantize", tiny_model_dir("qwen2"), tmp_path / "out")[0] == 0
    tiny_tokenizer.save_pretrained(tmp_path / "out")
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "1?", "answer": "#### 1"}))
    code, _, err = call("eval", tmp_path / "out", "--data", tmp_path, "--max-new-tokens", 2, "--temperature", 0)
    assert code == 0, err
    assert json.loads((tmp_path / "out/eval-local.json").read_text())["base_format"] == "nvfp4"


def test_eval_in_vllm_computes_in_the_models_dtype(tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch):
    """vLLM rounds a float32 model to 16 bits unless it is told."""
    dense, served = tmp_path / "dense", []
    AutoModelForCausalLM.from_pretrained(tiny_model_dir("qwen2"), dtype=torch.float32).save_pretrained(dense)
    tiny_tokenizer.save_pretrained(dense)
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "1?", "answer": "#### 1"}))
    monkeypatch.setattr(
        evaluation, "vllm_engine", lambda *a, **o: served.append(o.get("dtype")) or (lambda d: ["1"] * len(d))
    )
    code, out, err = call("eval", dense, "--data", tmp_path, "--engine", "vllm")
    assert code == 0 and "local, float32 weights: " in out, err
    assert served == ["float32"]


def test_eval_asks_as_the_run_and_the_task_do(tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch):
    """A run that was trained with `enable_thinking: false` was measured with thinking, and a task's template held for training only."""
    policy = make_policy(tiny_model_dir("qwen2"), size=0.2)
    settings = {"base_format": "nvfp4", "scale_rule": "rtn", "dtype": "float32", "model": str(tiny_model_dir("qwen2"))}
    settings["options"] = {"chat_template_kwargs": {"enable_thinking": False}}
    export.save_adapter(TrainedPolicy(policy, tiny_tokenizer, settings), tmp_path / "run")
    (tmp_path / "own.jinja").write_text("{{ messages[-1].content }} aloud")
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "1?", "answer": "one"}))
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "2?", "answer": "two"}))
    (tmp_path / "task.yaml").write_text("dataset_name: .\ngrader: exact\nchat_template_path: own.jinja\n")
    asked, texts_of = [], evaluation.prompt_texts

    def prompt_texts(tokenizer, prompts, template):
        asked.append((texts_of(tokenizer, prompts, template), template))
        return asked[-1][0]

    monkeypatch.setattr(evaluation, "prompt_texts", prompt_texts)
    limits = ["--max-new-tokens", 2, "--temperature", 0, "--output", tmp_path / "eval.json"]
    of_the_task = ["--task", tmp_path / "task.yaml"]
    for said in (of_the_task, ["--data", tmp_path]):
        code, _, err = call("eval", tmp_path / "run", *limits, *said)
        assert code == 0, err
    assert asked[0] == (["1? aloud"], {"enable_thinking": False})
    assert asked[1][1] == {"enable_thinking": False} and "aloud" not in asked[1][0][0]
    code, _, err = call("eval", tmp_path / "run", *of_the_task, "--data", tmp_path)
    assert code == 2 and "Leave one out" in err


def test_merge_asks_as_eval_does(tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch):
    """Its distance was measured with thinking, without the task's template, and without the task's system message where a row has a question
    too. A merged folder was measured with the protocol's limit instead of the run's."""
    policy = make_policy(tiny_model_dir("qwen2"), size=0.2)
    settings = {"base_format": "nvfp4", "scale_rule": "rtn", "dtype": "float32", "model": str(tiny_model_dir("qwen2"))}
    settings |= {"max_completion_length": 3, "options": {"chat_template_kwargs": {"enable_thinking": False}}}
    export.save_adapter(TrainedPolicy(policy, tiny_tokenizer, settings), tmp_path / "run")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{{ 'aloud' if enable_thinking else 'quietly' }}"
    (tmp_path / "own.jinja").write_text(template)
    rows = [{"prompt": f"{i}?", "question": "another", "answer": str(i)} for i in range(2)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = ["dataset_name: .", "grader: exact", "chat_template_path: own.jinja", "system_prompt: In words."]
    (tmp_path / "task.yaml").write_text("\n".join(lines))
    asked, distances = [], export.prompt_batches

    def prompt_batches(*arguments):
        batches = distances(*arguments)
        asked.append([tiny_tokenizer.decode(ids[0]) for ids in batches])
        return batches

    monkeypatch.setattr(export, "prompt_batches", prompt_batches)
    of_the_task = ["--task", tmp_path / "task.yaml"]
    for source, target, form in (("run", "again", "adapter"), ("again", "merged", "bf16")):
        code, _, err = call("merge", tmp_path / source, tmp_path / target, "--as", form, *of_the_task)
        assert code == 0, err
        assert asked == ([] if form == "adapter" else [[f"In words. {i}? quietly{i}" for i in range(2)]])
    kept = AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert kept == tiny_tokenizer.chat_template != template
    code, _, err = call("eval", tmp_path / "merged", *of_the_task)
    assert code == 0, err
    measured = json.loads((tmp_path / "merged/eval-task.json").read_text())["protocol"]
    assert measured["chat_template_kwargs"] == {"enable_thinking": False} and measured["max_new_tokens"] == 3


def test_train_runs_the_example(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))
    call("train", "--config", "embedded", "--max_steps", "3", "--aqn", "false")
    script, config = str(ROOT / "examples/grpo_gsm8k.py"), str(ROOT / "examples/configs/embedded.yaml")
    assert started[0] == [sys.executable, script, "--max_steps", "3", "--aqn", "false", "--config", config]
    for number, option in enumerate(
        ("--num-processes", "--num_processes"), 1
    ):  # the second is accelerate's, and went to the run
        call("train", option, "2", "--model_name_or_path", "a_b")
        assert started[number][1:5] == ["-m", "accelerate.commands.launch", "--num_processes", "2"]
        assert started[number][-2:] == ["--model_name_or_path", "a_b"]
    file = str(ROOT / "examples/accelerate/fsdp2_2.yaml")
    for more in ([], ["--num_processes", "4"]):  # as trl grpo takes it
        started.clear()
        call("train", "--accelerate_config", "fsdp2_2", *more)
        assert started[0] == [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, *more, script]
    assert "fsdp2_2, fsdp2_4" in call("train", "--accelerate_config", "fsdp9")[2]
    code, _, err = call("train", "--config", "gpt9")
    assert code == 2 and "embedded" in err


def test_progress_of_a_quick_command_leaves_a_log_alone(capsys):
    with options.progress_bar("quantizing") as progress:
        for _ in range(4):
            progress(1_000_000_000, 8_000_000_000)
    assert not capsys.readouterr().err.strip()


def test_hub_errors_are_runtime_errors():
    assert issubclass(hub.HubError, RuntimeError)  # so that main() turns them into exit code 1


def test_an_evaluation_that_could_not_be_kept_is_refused_before_it_is_made(tmp_path, monkeypatch):
    from qerl_trl.cli import evaluate as run

    monkeypatch.setattr(run.os, "access", lambda folder, mode: False)
    for output in (None, tmp_path / "there.json"):
        with pytest.raises(ValueError, match="cannot be written"):
            run._output_file(output, tmp_path, "gsm8k", None)


def test_a_plan_refuses_what_a_run_refuses(tiny_model_dir, tmp_path):
    (tmp_path / "run.yaml").write_text("output_dir: x\nmax_completion_lenght: 16000\n")
    code, _, err = call("plan", tiny_model_dir("qwen2"), "--config", tmp_path / "run.yaml")
    assert code == 2 and "max_completion_lenght" in err and "There is --max_completion_length" in err
    (tmp_path / "run.yaml").write_text("output_dir: x\nenv: {WANDB_MODE: offline}\nbase_format: bf16\n")
    assert call("plan", tiny_model_dir("qwen2"), "--config", tmp_path / "run.yaml")[0] == 0  # TRL's own
    config = json.loads((tiny_model_dir("qwen2") / "config.json").read_text())
    (tmp_path / "awq").mkdir()
    stored = {"quant_method": "awq", "bits": 4, "group_size": 128}
    (tmp_path / "awq/config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    code, _, err = call("plan", tmp_path / "awq")
    assert code == 2 and "quant_method='awq' is not an NVFP4 checkpoint" in err


def test_a_mixture_of_experts_is_planned_as_it_can_be_run(tmp_path):
    """It was planned, to fit, with an engine that refuses it."""
    config = MixtralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=320,
    )
    config.save_pretrained(tmp_path)
    code, _, err = call("plan", tmp_path)
    assert code == 2 and "mixture of experts" in err and "--no-vllm" in err
    code, _, err = call("plan", tmp_path, "--no-vllm")
    assert code == 0 and "modules_to_not_convert: [experts]" in err
    assert call("plan", tmp_path, "--base-format", "bf16")[0] == 2  # no engine of ours has experts, on any base
    code, _, err = call("plan", tmp_path, "--base-format", "bf16", "--no-vllm")
    assert code == 0 and "experts" not in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_completion_length: -4", "max_completion_length=-4 is out of range"),
        ("per_device_train_batch_size: 0", "per_device_train_batch_size=0 is out of range"),
        ("per_device_train_batch_size: -1", "per_device_train_batch_size=-1 is out of range"),
        ("gradient_accumulation_steps: 0", "gradient_accumulation_steps=0 is out of range"),
        ("num_generations: 0", "num_generations=0 is out of range"),
        ("steps_per_generation: 0", "steps_per_generation=0 is out of range"),
        ("max_completion_length: null", "max_completion_length=None is out of range"),
        ("vllm_engine_kwargs: {max_num_seqs: 0}", "max_num_seqs=0 is out of range"),
        ("task: nowhere", "task: nowhere is no file here or beside run.yaml"),
        ('vllm_engine_kwargs: {max_num_seqs: "8"}', "max_num_seqs='8' is out of range"),
        ("vllm_engine_kwargs: '{foo'", "vllm_engine_kwargs is not JSON"),
    ],
)
def test_a_plan_refuses_what_no_run_could_be_made_of(line, message, tiny_model_dir, tmp_path):
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: {tiny_model_dir('qwen2')}\noutput_dir: x\n{line}\n")
    code, _, err = call("plan", "--config", tmp_path / "run.yaml")
    assert code == 2 and message in err


def test_a_merge_has_the_type_that_was_asked_for(tiny_model_dir, tmp_path):
    policy = make_policy(tiny_model_dir("qwen2"))
    export.save_adapter(policy, tmp_path / "run", base_model=str(tiny_model_dir("qwen2")))
    for words, wanted in (((), "bfloat16"), (("--dtype", "float32"), "float32")):
        code, _, err = call("merge", tmp_path / "run", tmp_path / wanted, "--base-format", "nvfp4", *words)
        assert code == 0, err
        assert json.loads((tmp_path / wanted / "config.json").read_text())["dtype"] == wanted
    for wrong in ("auto", "bf16", "float64"):
        code, _, err = call("merge", tmp_path / "run", tmp_path / "no", "--dtype", wrong)
        assert code == 2 and "--dtype" in err and "bfloat16" in err
    for words in ((), ("--overwrite",)):
        code, out, err = call("merge", tmp_path / "run", tmp_path / "bfloat16", "--base-format", "nvfp4", *words)
        assert "written: " in out if words else code == 2 and "already exists" in err


@pytest.mark.parametrize("form", ["bf16", "base"])
def test_the_type_of_what_is_written_is_not_that_of_what_was_trained(form, tiny_model_dir, tiny_tokenizer, tmp_path):
    """The base was loaded in it, and refused as another one than the run's; of a base it was written, which was said not to be so."""
    folder, policy = tmp_path / "run", make_policy(tiny_model_dir("qwen2"), size=0.2)
    settings = {"base_format": "nvfp4", "dtype": "float32", "model": str(tiny_model_dir("qwen2"))}
    export.save_adapter(TrainedPolicy(policy, tiny_tokenizer, settings | {"base_sha256": base_sha256(policy)}), folder)
    plain, typed = tmp_path / "plain", tmp_path / "typed"
    assert call("merge", folder, plain, "--as", form)[0] == 0
    code, _, err = call("merge", folder, typed, "--as", form, "--dtype", "float16")
    assert code == 0, err
    found, before = (load_file(at / "model.safetensors") for at in (typed, plain))
    if form == "bf16":
        assert {tensor.dtype for tensor in found.values()} == {torch.float16}
    else:
        assert (
            all(torch.equal(found[name], tensor) for name, tensor in before.items()) and found.keys() == before.keys()
        )


def test_a_run_that_did_not_save_its_end_is_told_its_newest_checkpoint(tmp_path):
    folder = tmp_path / "run" / "checkpoint-3"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    seal.seal(folder)
    for words in (("merge", tmp_path / "run", tmp_path / "out"), ("eval", tmp_path / "run")):
        code, _, err = call(*words)
        assert code != 0 and f"name its newest checkpoint, {folder}" in err


def test_some_completions_without_an_answer_are_counted(run, tmp_path, monkeypatch):
    """It was said of more than half only."""
    problems = tmp_path / "test.jsonl"
    problems.write_text("\n".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) for i in range(5)))
    said = ["#### 0", "#### 1", "#### 2", "#### 3", "4"]
    monkeypatch.setattr(evaluation, "transformers_engine", lambda *arguments: lambda data: said)
    code, out, err = call("eval", run[0], "--data", problems, "--output", tmp_path / "eval.json")
    assert code == 0 and "1 of 5 completions state no answer" in out, err


def test_a_broken_file_of_an_option_is_named_and_not_shown(tmp_path):
    (tmp_path / "f.json").write_text('{"secret": "abc", oops')
    with pytest.raises(ValueError, match="accelerator_config is not JSON") as refused:
        QeRLConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, accelerator_config=str(tmp_path / "f.json"))
    assert "abc" not in str(refused.value)


def test_an_engine_s_number_that_is_none_is_the_engine_s_own(tiny_model_dir, tmp_path):
    said = []
    for line in ("", "vllm_engine_kwargs: {max_num_seqs: null}\n"):
        path = tmp_path / "run.yaml"
        path.write_text(f"model_name_or_path: {tiny_model_dir('qwen2')}\noutput_dir: x\nuse_vllm: true\n{line}")
        code, out, err = call("plan", "--config", path, "--gpu-gib", "24", "--json")
        assert code == 0, err
        said.append(json.loads(out))
    assert said[0] == said[1]
