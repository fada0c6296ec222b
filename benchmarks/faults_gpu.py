"""Faults of a rollout and of a process, injected into real training: GRPO on an NVFP4 base in bf16 with vLLM in the process.

    python benchmarks/faults_gpu.py --output benchmarks/results/faults_gpu.json     # 1 or 2 GPUs, under 5 minutes
    python benchmarks/faults_gpu.py healthy "adapter doubled"                                  # some of them
    python benchmarks/faults_gpu.py --device cpu --jobs 1                                      # dry run, what a CPU can show

Rows of other faults in `--output` stay, each with the commit, the command, the releases and the GPUs of its own run where these are not the
file's.

The model is a random Qwen2 of 8 layers whose layers move their input as much as a wide trained model's and whose logits are as sharp
(`write_model`). Each fault is a process of its own, several side by side; faults_gpu_cases.py says where it is put in and what has to happen.
A row: {fault, caught, when: "start" or "step n", error, message, recovered, fine}. `recovered`: after a fault in the middle of a run, the same
command without it goes on from the step that was saved and ends (None: nothing was trained yet, or the fault is not tried again).
"healthy" is a run without a fault: it must not be caught. tests/faults has these and the others on a CPU, with stand-ins.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
from faults_gpu_cases import FAULTS, REWARD, Fault

#: steps of a run; the noise begins in the third
STEPS = 4
#: seconds for one process
LIMIT = {"cuda": 180, "cpu": 600}
# --- one run ------------------------------------------------------------------------------------------------------------------------------


def write_model(folder: Path, device: str) -> str:
    """A random checkpoint: layers that move their input as those of a wide trained model do, logits with a standard deviation of 4."""
    import torch
    from step import tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, layers = (1024, 8) if device == "cuda" else (128, 4)
    config = Qwen2Config(
        vocab_size=2048, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=1.2 / hidden**0.5,
        eos_token_id=400, pad_token_id=401,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 4 / hidden**0.5)
        model.lm_head.weight[402:] *= 0.1  # the tokenizer has no words for them
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    if REWARD["hook"] is not None:
        REWARD["hook"]()
    return [float(sum(text.encode()) % 7) for text in completions]


def build(fault: Fault, model: str, run: str, device: str) -> Any:
    from peft import LoraConfig
    from step import prompts, tokenizer

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer

    cpu = device == "cpu"
    memory = (
        {"gpu_memory_utilization": 0.25} if cpu else {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 2**28}
    )
    settings = {
        "rollout_probe": "refuse",
        "output_dir": run, "use_cpu": cpu, "bf16": not cpu, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 8 if cpu else 32, "max_steps": STEPS, "learning_rate": 1e-4, "use_vllm": True, "vllm_mode": "colocate",
        "vllm_max_model_length": 256, "vllm_gpu_memory_utilization": memory["gpu_memory_utilization"],
        "vllm_engine_kwargs": {"enforce_eager": True, "max_num_seqs": 8, "block_size": 32 if cpu else 16, **memory}, "report_to": "none", "logging_steps": 1,
        "save_strategy": "steps", "save_steps": 1, "gradient_checkpointing": False, "disable_tqdm": True, "aqn_num_stages": 2,
        "model_init_kwargs": {"dtype": "bfloat16"},
    }  # fmt: skip
    lora = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **fault.lora}
    return QeRLGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=QeRLConfig(**settings | fault.settings),
        train_dataset=prompts(48, 2 * fault.processes),  # the same in every step: a prefix that is cached is used
        processing_class=tokenizer(),
        peft_config=LoraConfig(**lora),
    )


@contextlib.contextmanager
def watched(found: dict[str, Any], where: Callable[[], str]) -> Iterator[None]:
    """What ends the run goes into `found`."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        found |= {"caught": True, "when": where(), "error": type(error).__name__, "message": told}


def one_run(name: str, model: str, run: str, device: str, inject: bool) -> dict[str, Any]:
    """Train with the fault (or, `inject=False`, without), and say what came of it."""
    fault, trainer = FAULTS[name], None
    if not inject:
        fault = dataclasses.replace(fault, before=None, at_end_of=None)
    if fault.before is not None:
        fault.before()
    found: dict[str, Any] = {"caught": False, "when": None, "error": None, "message": None}
    began = time.perf_counter()
    with watched(found, lambda: "start"):
        trainer = build(fault, model, run, device)
    found["start_s"] = round(time.perf_counter() - began, 1)
    if trainer is None:
        return found
    from transformers import TrainerCallback

    class Inject(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if fault.at_end_of is not None and fault.step == state.global_step == 0:
                fault.at_end_of(trainer)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if fault.at_end_of is not None and state.global_step == fault.step:
                fault.at_end_of(trainer)

    trainer.add_callback(Inject())
    resume = not inject
    with watched(found, lambda: f"step {trainer.state.global_step}"):
        trainer.train(resume_from_checkpoint=resume)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["steps"] = trainer.state.global_step
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found["steps_logged"] = len(logs)
    keys = ("aqn/sigma", "aqn/sigma_effective", "rollout/mismatch_kl", "rollout/logp_gap", "entropy")
    found["logs"] = [{key: log[key] for key in keys if key in log} for log in logs]
    if trainer.args.use_vllm:
        found["probe"] = vars(trainer.vllm_generation.probe_result)
    return found


# --- all of them --------------------------------------------------------------------------------------------------------------------------


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def judged(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Whether it went as it has to."""
    said = all(word.lower() in (row["message"] or "").lower() for word in FAULTS[name].words)
    fine = row["caught"] is False if name == "healthy" else row["caught"] is True and said
    return {"fault": name, **row, "fine": fine and row.get("recovered") is not False}


def merged(record: dict[str, Any], former: dict[str, Any], names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`former` without the rows of `names`, and what each new row has to say of its own run, since it differs from what `former` says of all."""
    kept = [row for row in former["faults"] if row["fault"] not in names]
    own = {key: value for key, value in record.items() if key != "faults" and former.get(key) != value}
    return {**former, "faults": kept}, own


def run_all(names: list[str], device: str, jobs: int, output: Path | None, commit: str | None) -> int:
    root, ports = Path(tempfile.mkdtemp()), iter(range(29700, 30700, 2))
    model = write_model(root / "model", device)
    head = common.head(device, commit)
    record: dict[str, Any] = {name: head[name] for name in ("command", "commit", "versions")} | {"device": device}
    if device == "cuda":
        record |= {"gpu": head["device"].partition(",")[0], "gpus": gpus()}
    record["faults"], own = [], dict[str, Any]()
    if output is not None and output.exists():
        record, own = merged(record, json.loads(output.read_text()), names)
    waiting = [(name, True) for name in sorted(names, key=lambda name: FAULTS[name].alone)]
    rows: dict[str, dict[str, Any]] = {}

    def may(one: tuple[str, bool], running: list[tuple[str, bool]]) -> bool:
        alone = any(FAULTS[name].alone for name, _ in (one, *running))
        return len(running) < jobs and not (running and alone)

    def start(one: tuple[str, bool]) -> tuple[list[str], dict[str, str]]:
        (name, inject), port = one, next(ports)
        launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(FAULTS[name].processes), "--master_port", str(port)]  # fmt: skip
        run = str(root / name.replace(" ", "-"))
        worker = [__file__, "--worker", name, "--model", model, "--folder", run, "--device", device]
        command = [sys.executable, *(launch if FAULTS[name].processes > 1 else []), *worker]
        # TRL's way to a free port is the same in all of them
        environment = common.ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1", "MASTER_PORT": str(port + 1)}
        if FAULTS[name].processes == 1 and device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = str(port // 2 % gpus())
        return command if inject else [*command, "--without"], environment

    for (name, inject), row in common.results_of(waiting, start, may, LIMIT[device]):
        if "failed" in row:
            why, said = row.pop("failed"), "\n".join(row.pop("last_lines"))[-2000:]
            row |= {"caught": None, "when": None, "error": "time" if why == "time" else "no result", "message": said}
        row["seconds"] = row.pop("seconds_in_all", 0.0)
        if inject:
            rows[name] = row | {"recovered": None}
            if FAULTS[name].again and row["caught"] and row["when"] != "start":
                waiting.insert(0, (name, False))
                continue
        else:
            whole = row["caught"] is False and row["steps"] == FAULTS[name].settings.get("max_steps", STEPS)
            rows[name] |= {"recovered": whole, "seconds": rows[name]["seconds"] + row["seconds"]}
            rows[name] |= {} if whole else {"afterwards": row}
        done = judged(name, rows[name]) | own
        record["faults"].append(done)
        told = (done["message"] or "").replace("\n", " ")[:230]
        verdict = f"{'ok  ' if done['fine'] else 'LOOK'} {name}: caught={done['caught']} {done['when']}"
        print(f"{verdict} recovered={done['recovered']} {done['seconds']:.0f}s | {told}", flush=True)
        common.save(record, output)
    wrong = [row["fault"] for row in record["faults"] if row["fault"] in names and not row["fine"]]
    print(f"to look at: {wrong or 'none'}")
    return len(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of: {', '.join(FAULTS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--jobs", type=int, default=8, help="processes side by side")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="Of the code that runs, where there is no git.")
    for hidden in ("--worker", "--model", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--without", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        found = one_run(args.worker, args.model, args.folder, args.device, not args.without)
        rank = int(os.environ.get("RANK", "0"))
        if rank == 0 or found["caught"]:
            print("\nRESULT " + json.dumps(found), flush=True)
        # an engine's own shutdown takes seconds, and a process that lost another would wait for it
        os._exit(1 if rank and found["caught"] else 0)
    unknown = set(args.faults) - set(FAULTS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} is none of them: {', '.join(FAULTS)}")
    here, cuda = [], args.device == "cuda"
    for name in args.faults or FAULTS:
        if gpus() >= FAULTS[name].processes if cuda else not FAULTS[name].gpu:
            here.append(name)
        else:
            print(f"-    {name}: not on this machine ({'needs 2 GPUs' if cuda else 'needs a GPU'})")
    sys.exit(min(1, run_all(here, args.device, args.jobs, args.output, args.commit)))


if __name__ == "__main__":
    main()
