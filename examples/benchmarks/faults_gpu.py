"""Faults of a rollout and of a process, injected into real training: GRPO on an NVFP4 base in bf16 with vLLM in the process.

    python examples/benchmarks/faults_gpu.py --output examples/benchmarks/results/faults_h200.json     # 1 or 2 GPUs, under 5 minutes
    python examples/benchmarks/faults_gpu.py healthy "adapter doubled"                                  # some of them
    python examples/benchmarks/faults_gpu.py --device cpu --jobs 1                                      # dry run, what a CPU can show

The model is a random Qwen2 of 8 layers whose layers move their input as much as a wide trained model's and whose logits are as sharp
(`write_model`). Each fault is a process of its own, several side by side; `FAULTS` says where it is put in and what has to happen.
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

#: steps of a run; the noise begins in the third
STEPS = 4
#: seconds for one process
LIMIT = {"cuda": 180, "cpu": 600}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "TOKENIZERS_PARALLELISM": "false", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fault:
    """`before` is called before the trainer is built, `at_end_of` with the trainer at the end of step `step`. `words`: the message has them.

    again: whether the same command is run again without the fault. gpu: only a GPU can have it. processes: of the run.
    """

    words: tuple[str, ...]
    before: Callable[[], None] | None = None
    at_end_of: Callable[[Any], None] | None = None
    step: int = 1
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    again: bool = False
    gpu: bool = False
    processes: int = 1
    lora: dict[str, Any] = dataclasses.field(default_factory=dict)


# --- how faults are put in ---------------------------------------------------------------------------------------------------------------


def adapter(change: Callable[[dict], dict]) -> Callable[[], None]:
    """The engine takes the adapter, says so, and computes with another."""

    def inject() -> None:
        from qerl_trl.rollout.vllm.state import RolloutState
        from qerl_trl.rollout.wire import update_fingerprint

        load = RolloutState.load_adapter

        def wrong(self: Any, adapter: Any, norms: Any, received: str | None = None) -> int:
            return load(self, change(dict(adapter)), norms, received or update_fingerprint(adapter, norms))

        RolloutState.load_adapter = wrong

    return inject


def scaled(factor: float) -> Callable[[dict], dict]:
    return lambda adapter: {n: dataclasses.replace(t, scaling=t.scaling * factor) for n, t in adapter.items()}


def without(lost: Callable[[str], Any]) -> Callable[[dict], dict]:
    return lambda adapter: {n: t for n, t in adapter.items() if not lost(n)}


def exchanged(adapter: dict) -> dict:
    def other(name: str) -> str:
        return name.replace("k_proj", "v_proj") if "k_proj" in name else name.replace("v_proj", "k_proj")

    return {name: adapter[other(name)] for name in adapter}


def serve_unquantized() -> None:
    """vLLM computes with the bf16 weights that the base was quantized from."""
    from qerl_trl.rollout.spec import EngineSpec
    from qerl_trl.rollout.vllm.in_process import InProcessEngine

    build = InProcessEngine.__init__

    def wrong(self: Any, model: Any, spec: Any, share: bool, *args: Any, **kwargs: Any) -> None:
        import torch
        from peft import get_peft_model
        from transformers import AutoModelForCausalLM

        dense = AutoModelForCausalLM.from_pretrained(model.config._name_or_path, dtype=torch.bfloat16)
        policy = get_peft_model(dense.to(model.device), model.peft_config["default"])
        policy.requires_grad_(False)
        spec = EngineSpec.of(policy, dtype=torch.bfloat16, max_model_len=spec.max_model_len)
        build(self, policy, spec, False, *args, **kwargs)

    InProcessEngine.__init__ = wrong


def noise_is_not_written() -> None:
    from qerl_trl.rollout.vllm import state

    state.RolloutState.set_noise = lambda self, draw: setattr(self, "draw", draw)


def noise_stays() -> None:
    from qerl_trl.rollout.vllm.state import RolloutState

    put = RolloutState.set_noise
    RolloutState.set_noise = lambda self, draw: put(self, draw) if draw.sigma else setattr(self, "draw", draw)


def ask_greedily(trainer: Any) -> None:
    """A measurement between steps, which has no noise."""
    trainer.vllm_generation.generate_greedily([[5, 6, 7]], 4)


def refuse_reset(trainer: Any) -> None:
    trainer.vllm_generation.llm.reset_prefix_cache = lambda: False


def forget_reset(trainer: Any) -> None:
    """Cached prefixes outlive the weights that they were computed with."""
    trainer.vllm_generation.engine.reset_prefix_cache = lambda: None


def no_room_for_the_engine() -> None:
    import torch

    from qerl_trl.rollout.generation import QeRLVLLMGeneration

    build = QeRLVLLMGeneration._in_process

    def short(self: Any) -> Any:
        no_room()
        return build(self)

    assert torch.cuda.is_available()
    QeRLVLLMGeneration._in_process = short


def no_room(trainer: Any = None) -> None:
    """Nothing more than the allocator has now."""
    import torch

    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    )


def dies(trainer: Any) -> None:
    def generate(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("EngineCore encountered a fatal error")

    trainer.vllm_generation.llm.generate = generate


def hangs(trainer: Any) -> None:
    trainer.vllm_generation.llm.generate = lambda *args, **kwargs: time.sleep(100)


def of_answers(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """`change` is made to the first sequence of every answer of the engine."""

    def inject(trainer: Any) -> None:
        llm = trainer.vllm_generation.llm
        generate = llm.generate

        def changed(*args: Any, **kwargs: Any) -> Any:
            outputs = generate(*args, **kwargs)
            for output in outputs:
                change(output.outputs[0])
            return outputs

        llm.generate = changed

    return inject


def nan_logps(sequence: Any) -> None:
    for step in sequence.logprobs:
        for entry in step.values():
            entry.logprob = float("nan")


def shifted_logps(sequence: Any) -> None:
    for step in sequence.logprobs:
        for entry in step.values():
            entry.logprob -= 1.0


def empty(sequence: Any) -> None:
    sequence.token_ids, sequence.logprobs = [], []


def damage(trainer: Any) -> None:
    """One element of one weight of the engine's."""
    from qerl_trl.rollout.vllm.in_process import engine_model

    layer = engine_model(trainer.vllm_generation.llm).model.layers[3].mlp.down_proj
    layer.weight_packed.data[7, 11] += 1


def wake_wrong(what: Callable[[Any], None]) -> Callable[[Any], None]:
    """The engine sleeps after every rollout; when it next wakes, something is not as it was."""

    def inject(trainer: Any) -> None:
        engine = trainer.vllm_generation.engine
        wake = engine.wake

        def wrong() -> None:
            asleep = engine.asleep
            wake()
            if asleep:
                what(trainer)

        engine.wake = wrong

    return inject


def other_norm(trainer: Any) -> None:
    """A norm without noise, which the engine has of its own; an adapter that is lost so is put anew in every step."""
    from qerl_trl.rollout.vllm.in_process import engine_model

    engine_model(trainer.vllm_generation.llm).model.norm.weight.data.mul_(1.5)


def full_disk(trainer: Any) -> None:
    """The file system refuses what is longer, as a full one does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))


def reward_hangs(trainer: Any) -> None:
    REWARD["hook"] = lambda: time.sleep(100)


def rank_dies(trainer: Any) -> None:
    if trainer.accelerator.process_index == 1:

        def lost() -> None:
            raise KeyError("answer")

        REWARD["hook"] = lost


def huge_adapter(trainer: Any) -> None:
    """A step that diverged."""
    import torch

    with torch.no_grad():
        next(p for n, p in trainer.model.named_parameters() if "lora_B" in n)[0, 0] = float("inf")


REWARD: dict[str, Any] = {"hook": None}

PROBE = ("part of the adapter is lost, misplaced or scaled", "nats")
FAULTS = {
    "healthy": Fault(()),
    "adapter doubled": Fault(PROBE, adapter(scaled(2.0))),
    "adapter halved": Fault(PROBE, adapter(scaled(0.5))),
    "half of the layers lost": Fault(PROBE, adapter(without(lambda name: int(name.split(".")[2]) % 2))),
    "all MLPs lost": Fault(PROBE, adapter(without(lambda name: ".mlp." in name))),
    "k and v exchanged": Fault(PROBE, adapter(exchanged)),
    "adapter ignored": Fault(("adapter does not reach the engine",), adapter(scaled(0.0))),
    "adapter on the embeddings unsent": Fault(
        ("embed_tokens", "use_vllm=False"), lora={"target_modules": ["q_proj", "embed_tokens"]}
    ),
    "unquantized weights served": Fault(("disagree without any adapter",), serve_unquantized),
    "noise absent": Fault(("noise", "sigma"), noise_is_not_written, settings={"aqn_num_stages": 2}),
    "noise left on": Fault(("noise",), noise_stays, ask_greedily, step=3),
    "prefix cache refuses to be reset": Fault(("prefix cache",), at_end_of=refuse_reset, again=True),
    "prefix cache not reset": Fault(("attention states of other weights", "enable_prefix_caching"), at_end_of=forget_reset, settings={"aqn": False}),
    "weight of the engine damaged": Fault(("no longer holds what was put into it",), at_end_of=damage, settings={"share_weights": False}),
    "awake with a damaged weight": Fault(
        ("no longer holds what was put into it", "vllm_enable_sleep_mode=False"), at_end_of=wake_wrong(damage), again=True, gpu=True,
        settings={"share_weights": False, "vllm_enable_sleep_mode": True},
    ),
    "awake with another norm": Fault(
        ("no longer holds what was put into it",), at_end_of=wake_wrong(other_norm), gpu=True, settings={"vllm_enable_sleep_mode": True}
    ),
    "out of memory at start": Fault(("Out of memory when the engine started",), no_room_for_the_engine, gpu=True),
    "out of memory in a step": Fault(("memory", "step"), at_end_of=no_room, again=True, gpu=True),
    "engine dead": Fault(("The rollout failed in vLLM", "fatal error"), at_end_of=dies, again=True),
    "engine hangs": Fault(("rollout_timeout=20",), at_end_of=hangs, settings={"rollout_timeout": 20.0}),
    "log-probabilities NaN": Fault(("are not finite",), at_end_of=of_answers(nan_logps), again=True),
    "log-probabilities shifted by 1 nat": Fault(("not those its tokens were drawn with",), at_end_of=of_answers(shifted_logps), step=1,
                                                settings={"max_steps": 6}),
    "completions empty": Fault(("is empty",), at_end_of=of_answers(empty)),
    "adapter infinite": Fault(("NaN or infinity",), at_end_of=huge_adapter),
    "reward hangs": Fault(("reward_timeout",), at_end_of=reward_hangs, settings={"reward_timeout": 5.0}, again=True),
    "disk full": Fault(("no room to write",), at_end_of=full_disk, step=2, again=True),
    "one process of two fails": Fault(("raised KeyError", "resume"), at_end_of=rank_dies, processes=2, settings={"use_vllm": False}),
}  # fmt: skip


# --- one run ------------------------------------------------------------------------------------------------------------------------------


def write_model(folder: Path, device: str) -> str:
    """A random checkpoint: layers that move their input as those of a wide trained model do, logits with a standard deviation of 4."""
    import torch
    from plan_check import tokenizer
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
    from plan_check import prompts, tokenizer

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer

    cpu = device == "cpu"
    memory = (
        {"gpu_memory_utilization": 0.25} if cpu else {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 2**28}
    )
    settings = {
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
        found |= {"caught": True, "when": where(), "error": type(error).__name__, "message": str(error)}


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
    found["steps_here"] = len(logs)
    keys = ("aqn/sigma", "aqn/sigma_effective", "rollout/mismatch_kl", "rollout/logp_gap", "entropy")
    found["logs"] = [{key: log[key] for key in keys if key in log} for log in logs]
    if trainer.args.use_vllm:
        found["probe"] = vars(trainer.vllm_generation.probe_result)
    return found


# --- all of them --------------------------------------------------------------------------------------------------------------------------


def started(name: str, model: str, run: Path, device: str, inject: bool, number: int) -> subprocess.Popen:
    fault = FAULTS[name]
    command = [sys.executable, __file__, "--worker", name, "--model", model, "--folder", str(run), "--device", device]
    command += [] if inject else ["--without"]
    if fault.processes > 1:
        launch = [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(fault.processes),
            "--master_port",
            str(29700 + number),
        ]
        command[1:1] = launch
    environment = ENVIRONMENT | os.environ
    environment["MASTER_PORT"] = str(29800 + number)  # TRL's way to a free one is the same in all of them
    if fault.processes == 1 and device == "cuda" and (count := gpus()) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = str(number % count)
    log = open(f"{run}-{'with' if inject else 'without'}.log", "w")  # noqa: SIM115  (lives as long as the process)
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def result_of(run: Path, inject: bool, late: bool) -> dict[str, Any]:
    lines = Path(f"{run}-{'with' if inject else 'without'}.log").read_text(errors="replace").splitlines()
    line = next((line for line in lines if line.startswith("RESULT ")), None)
    if line is not None:
        return json.loads(line.removeprefix("RESULT "))
    return {
        "caught": None,
        "when": None,
        "error": "time" if late else "no result",
        "message": "\n".join(lines[-12:])[-2000:],
    }


def judged(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Whether it went as it has to."""
    words = FAULTS[name].words
    said = all(word.lower() in (row["message"] or "").lower() for word in words)
    fine = row["caught"] is False if name == "healthy" else row["caught"] is True and said
    return {"fault": name, **row, "fine": fine and row.get("recovered") is not False}


def run_all(names: list[str], device: str, jobs: int, output: Path | None) -> int:
    from qerl_trl import report

    root = Path(tempfile.mkdtemp())
    model = write_model(root / "model", device)
    record: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "commit": os.environ.get("BENCH_COMMIT"),
        "versions": report.versions(),
        "device": device,
        "faults": [],
    }
    if device == "cuda":
        import torch

        record |= {"gpu": torch.cuda.get_device_name(), "gpus": gpus()}
    if output is not None and output.exists():  # of the same code: its other rows stay
        former = json.loads(output.read_text())
        if former["commit"] == record["commit"]:
            record["faults"] = [row for row in former["faults"] if row["fault"] not in names]
    waiting = [(name, True) for name in names]
    rows: dict[str, dict[str, Any]] = {}
    running: dict[tuple[str, bool], tuple[subprocess.Popen, Path, float]] = {}
    began, number = time.monotonic(), 0
    while waiting or running:
        while waiting and len(running) < jobs:
            name, inject = waiting.pop(0)
            run = root / name.replace(" ", "-")
            running[name, inject] = started(name, model, run, device, inject, number), run, time.monotonic()
            number += 1
        for (name, inject), (process, run, since) in list(running.items()):
            late = time.monotonic() - since > LIMIT[device]
            if process.poll() is None and late:
                process.kill()
                process.wait()
            if process.poll() is None:
                continue
            del running[name, inject]
            row = result_of(run, inject, late) | {"seconds": round(time.monotonic() - since, 1)}
            if inject:
                rows[name] = row | {"recovered": None}
                if FAULTS[name].again and row["caught"] and row["when"] != "start":
                    waiting.insert(0, (name, False))
                    continue
            else:
                whole = row["caught"] is False and row["steps"] == FAULTS[name].settings.get("max_steps", STEPS)
                rows[name] |= {"recovered": whole, "seconds": rows[name]["seconds"] + row["seconds"]}
                if not whole:
                    rows[name]["afterwards"] = row
            done = judged(name, rows[name])
            record["faults"].append(done)
            told = (done["message"] or "").replace("\n", " ")[:230]
            verdict = "ok  " if done["fine"] else "LOOK"
            print(
                f"{verdict} {name}: caught={done['caught']} {done['when']} recovered={done['recovered']} {done['seconds']:.0f}s | {told}",
                flush=True,
            )
            if name == "healthy":
                print(json.dumps({key: done.get(key) for key in ("probe", "logs")}, indent=1), flush=True)
            if output is not None:
                output.write_text(json.dumps(record, indent=1) + "\n")
        time.sleep(0.3)
    ran = [row for row in record["faults"] if row["fault"] in names]
    wrong = [row["fault"] for row in ran if not row["fine"]]
    caught = sum(row["caught"] is True for row in ran)
    print(
        f"{caught} of {len(names) - ('healthy' in names)} caught, in {time.monotonic() - began:.0f} s; to look at: {wrong or 'none'}"
    )
    return len(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of: {', '.join(FAULTS)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--jobs", type=int, default=8, help="processes side by side")
    parser.add_argument("--output", type=Path)
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
    here = [
        name
        for name in args.faults or FAULTS
        if (args.device == "cuda" and gpus() >= FAULTS[name].processes)
        or (args.device == "cpu" and not FAULTS[name].gpu)
    ]
    for name in set(args.faults or FAULTS) - set(here):
        print(f"-    {name}: not on this machine ({'needs a GPU' if args.device == 'cpu' else 'needs 2 GPUs'})")
    sys.exit(min(1, run_all(here, args.device, args.jobs, args.output)))


if __name__ == "__main__":
    main()
