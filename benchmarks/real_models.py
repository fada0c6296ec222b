#!/usr/bin/env python3
"""Real pretrained models in every arm: train with the shipped command, merge, push, and reload with stock libraries.

    python benchmarks/real_models.py --task TASK.yaml --model Qwen/Qwen2.5-Coder-0.5B-Instruct FOLDER SHA256
    ... --model NAME FOLDER SHA256 --runs nvfp4 bf16+noise server   # SHA256 of the GGUF behind FOLDER
    ... --extra --optim adamw_torch                                 # further options of every run; comes last
    python benchmarks/real_models.py --cpu --out /tmp/real.json     # dry run: the embedded model, two steps
    ... --measure-noise --out results/noise_units/NAME.json --extra --aqn_schedule constant --learning_rate 0 ...

A run is `accelerate launch examples/grpo_gsm8k.py` with the recipe qwen2.5-3b.yaml; model, task, arm, lengths, batch
and learning rate are options. Runs share one GPU, each with a smaller visible size (shown_card.py). Run `server` trains
with a server on the same GPU, started by the printed command. Each run has a stand-in Hub (tests/hub_server.py).

A row has seconds since the start (`ready_s`: model and engine; `evaluated_s`: accuracy before training;
`first_step_s`), distinct log messages from WARNING up, and the later commands. A reloaded model scores the policy's
greedy answers to held-out problems: `kl` in nats per token, `same_greedy` as a share of the tokens. Output of the runs
goes to a log next to the file.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
from common import RESULTS, ROOT

sys.path.append(str(ROOT))
OUT = RESULTS / "real_models_h200.json"
#: run -> arm of `qerl-trl arms`
RUNS = {
    "nvfp4": "nvfp4-no-noise", "nvfp4+noise": "nvfp4", "bf16": "bf16-no-noise", "bf16+noise": "bf16", "server": "nvfp4",
}  # fmt: skip
RECIPE = "examples/configs/qwen2.5-3b.yaml"
SETTINGS = {
    "max_steps": 20, "num_generations": 8, "generation_batch_size": 256, "per_device_train_batch_size": 16,
    "max_completion_length": 320, "learning_rate": "3e-5", "eval_problems": 200, "seed": 1,
}  # fmt: skip
ON_CPU = {
    "max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 16,
    "eval_problems": 8, "learning_rate": "1e-2", "use_vllm": "false", "seed": 1,
}  # fmt: skip
#: GiB for a server, and for the server's KV cache
SERVER_GIB, KV_GIB = 6, 3
CURVES = {
    "reward": "rewards/correctness_reward/mean", "entropy": "entropy", "sigma": "aqn/sigma",
    "mismatch_kl": "rollout/mismatch_kl", "clipped": "completions/clipped_ratio", "share": "aqn/share",
    "expected_kl": "aqn/expected_kl",
    "seconds_rollout": "seconds/rollout", "seconds_update": "seconds/update",
}  # fmt: skip
STEP = re.compile(r"^step (\d+) of \d+")
#: appended to shown_card.py in sitecustomize.py: log records of a run as JSON lines
KEEP = """
if os.environ.get("WARNINGS_FILE"):
    import json, logging
    make = logging.getLogRecordFactory()
    def keep(*args, **kwargs):
        record = make(*args, **kwargs)
        probe = record.name.startswith("qerl_trl") and "robe" in str(record.msg) + record.name
        if record.levelno >= logging.WARNING or probe:
            with open(os.environ["WARNINGS_FILE"], "a") as file:
                file.write(json.dumps([record.levelname, record.name, record.getMessage()]) + "\\n")
        return record
    logging.setLogRecordFactory(keep)
    logging.getLogger("qerl_trl").setLevel(logging.INFO)
"""
#: limits for a reload that agrees with the policy
KL, SAME_GREEDY = 0.02, 0.9
PROBLEMS, NEW_TOKENS = 4, 64


def scored(model: Any, reference: dict[str, Any]) -> Any:
    """Log-probabilities of the entire vocabulary at the tokens of the policy's answers, (T, V)."""
    import torch

    with torch.no_grad():
        rows = [
            model(torch.tensor([p + a], device=model.device), use_cache=False).logits[0, len(p) - 1 : -1].float().cpu()
            for p, a in zip(reference["prompts"], reference["answers"], strict=True)
        ]
    return torch.cat(rows).log_softmax(-1)


def refer(file: str, run: str, task: str) -> None:
    import torch

    from qerl_trl.publish.load import load_policy
    from qerl_trl.support.recipes import task_file
    from qerl_trl.tasks.task import Task

    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy, own = load_policy(run, device=device), Task.read(task_file(task))
    tokenizer, found = own.prepared(policy.tokenizer), {"prompts": [], "answers": []}
    for row in own.splits()[1].select(range(PROBLEMS)):
        text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt], device=device)
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        output = policy.model.generate(ids, **given)
        found["prompts"].append(prompt)
        found["answers"].append(output[0, len(prompt) :].tolist())
    found |= {"logps": scored(policy.model, found), "dtype": policy.settings["dtype"]}
    with policy.model.disable_adapter():
        untrained = scored(policy.model, found)
    torch.save(found, file)
    print(json.dumps(distance(found, untrained)))


def distance(reference: dict[str, Any], logps: Any) -> dict[str, float]:
    mine = reference["logps"]
    kl = (mine.exp() * (mine - logps)).sum(-1).mean().item()
    return {"kl": round(kl, 5), "same_greedy": round((mine.argmax(-1) == logps.argmax(-1)).float().mean().item(), 3)}


def reload(file: str, base: str, adapter: str | None = None) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

    reference = torch.load(file)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"dtype": getattr(torch, reference["dtype"]), "device_map": {"": device}}
    if getattr(AutoConfig.from_pretrained(base), "quantization_config", None) is not None:  # as in the model cards
        options |= {"quantization_config": CompressedTensorsConfig(dequantize=True), "dtype": "auto"}
    model = AutoModelForCausalLM.from_pretrained(base, **options)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    found = distance(reference, scored(model.eval(), reference))
    assert "qerl_trl" not in sys.modules, "this is to be read without qerl-trl"
    print(json.dumps(found))


class Bench(common.Launcher):
    """State shared by the runs: options, path of their processes, record."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options.work, options.timeout, KEEP)
        self.options, self.lock = options, threading.Lock()
        self.names |= {f"{Path(options.task).parent}/": ""} | {folder: name for name, folder, _ in options.model}
        self.record: dict[str, Any] = {"runs": []}
        self.logs: dict[str, str] = {}

    def keep(self, row: dict[str, Any], lines: list[str] | None = None) -> None:
        with self.lock:
            if lines is not None:
                self.logs[f"{row['model']} {row['run']}"] = "\n".join(line[:400] for line in lines[-150:])
            if len(self.record) == 1:
                self.record = common.head("cpu" if self.options.cpu else "cuda") | self.record
            others = [one for one in self.record["runs"] if (one["model"], one["run"]) != (row["model"], row["run"])]
            self.record["runs"] = [*others, row]
            common.save(self.record, self.options.out)
            logs = "\n".join(f"===== {name} =====\n{text}" for name, text in self.logs.items())
            self.options.out.with_suffix(".log").write_text(f"{logs}\n")


class Run:
    def __init__(self, bench: Bench, model: tuple[str, str, str], run: str) -> None:
        self.bench, self.run, (self.name, self.model, gguf) = bench, run, model
        self.place = bench.work / self.name.replace("/", "--") / run
        self.place.mkdir(parents=True, exist_ok=True)
        self.row: dict[str, Any] = {"model": self.name, "run": run, "gguf_sha256": gguf, "passed": False}

    def command(self, folder: str, *last: str) -> list[str]:
        """The command as typed by a user."""
        from qerl_trl.tasks.arms import ARMS

        options = self.bench.options
        given = {"model_name_or_path": self.model, "task": options.task, "output_dir": self.place / folder}
        own = {"eval_problems": SETTINGS["eval_problems"], "seed": SETTINGS["seed"]}  # the rest is the recipe's
        given |= ARMS[RUNS[self.run]] | (ON_CPU if options.cpu else SETTINGS if options.recipe == RECIPE else own)
        start = ["accelerate", "launch", *(["--cpu"] if options.cpu else []), "examples/grpo_gsm8k.py"]
        recipe = "examples/configs/embedded.yaml" if options.cpu else options.recipe
        return [*start, "--config", recipe, *common.words(given), *last, *options.extra]

    def train(self) -> None:
        shown, last, server = {}, [], None
        if not self.bench.options.cpu:
            less = SERVER_GIB if self.run == "server" else 0
            shown = common.share_of_card(self.bench.options.parallel, self.place, less)
        if self.run == "server":
            server, url = self.server()
            last = ["--vllm_mode", "server", "--vllm_server_base_url", url]
        try:
            self.watch(self.command("run", *last), shown)
        finally:
            if server is not None:
                common.end(server.pid)

    def watch(self, command: list[str], shown: dict[str, str]) -> None:
        kept, began, steps = self.place / "warnings.jsonl", time.perf_counter(), dict[int, float]()
        kept.unlink(missing_ok=True)

        def look(line: str, seconds: float) -> None:
            if step := STEP.search(line):
                steps.setdefault(int(step[1]), seconds)

        code, lines, marks = self.bench.call(common.launched(command), look, WARNINGS_FILE=str(kept), **shown)
        file, times = self.place / "run/results.json", [steps[step] for step in sorted(steps)]
        results = json.loads(file.read_text()) if file.is_file() else {}
        history = results.get("log_history", [])
        said = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
        warned = [f"{level} {logger}: {text}" for level, logger, text in said if level != "INFO"]
        warned += [line.strip() for line in lines if re.search(r"\w*Warning: ", line)]
        peak = self.place / "peak"
        self.row |= {
            "command": self.bench.clean(shlex.join(command)), "exit_code": code, "trained": code == 0 and bool(results),
            "card_gib": float(shown.get("CARD_GIB", 0)) or None,
            "peak_gib": round(int(peak.read_text() or 0) / 2**30, 2) if peak.is_file() else None,
            "seconds": round(time.perf_counter() - began, 1), **marks, "first_step_s": times[0] if times else None,
            "seconds_per_step": round((times[-1] - times[0]) / (len(times) - 1), 2) if len(times) > 1 else None,
            "warnings": list(dict.fromkeys(map(self.bench.clean, warned))),
            "dominant": re.findall(r"(\d+) % of it from (\S+?)(?=,|$)", "\n".join(lines), re.MULTILINE),
            "probes": list(dict.fromkeys(text for level, _, text in said if level == "INFO")),
            **{name: results.get(name) for name in ("steps", "before", "after", "difference", "train_seconds")},
            "curves": {
                name: [float(f"{entry[key]:.4g}") for entry in history if entry.get(key) is not None]
                for name, key in CURVES.items()
            },
        }  # fmt: skip
        if not self.row["trained"]:
            self.row["last_lines"] = lines[-25:]
        self.bench.keep(self.row, lines)
        shown_last = {name: self.row.get(name) for name in ("trained", "seconds", "first_step_s", "seconds_per_step")}
        print(self.name, self.run, shown_last, flush=True)

    def server(self) -> tuple[subprocess.Popen, str]:
        """Start a server for this run with the command printed by a trainer that finds none."""
        url = f"http://127.0.0.1:{common.free_ports(1)[0]}"
        asking = ["--vllm_mode", "server", "--vllm_server_base_url", url, "--vllm_server_timeout", "1"]
        _, lines, _ = self.bench.call(common.launched(self.command("asking", *asking)))
        printed = next((line for line in lines if line.startswith("vllm serve ")), None)
        if printed is None:
            raise RuntimeError("\n".join(["The trainer printed no `vllm serve` command:", *lines[-25:]]))
        room = common.words({"gpu-memory-utilization": 0.02, "kv-cache-memory-bytes": KV_GIB * 2**30})
        given = [self.model if word == self.name else word for word in shlex.split(printed)[2:]]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *given, *room]
        log, began = self.place / "server.log", time.perf_counter()
        server, url = common.start(command, None, log, **common.ENVIRONMENT, PYTHONPATH=self.bench.path)
        common.RUNNING.add(server.pid)
        try:
            common.wait(server, url, log, self.bench.options.timeout)
        except RuntimeError:
            common.end(server.pid)
            raise
        ready = round(time.perf_counter() - began, 1)
        self.row |= {"server_command": f"{printed} {shlex.join(room)}", "server_ready_s": ready}
        return server, url

    def products(self) -> None:
        """Merge, push and reload."""
        from tests.hub_server import TOKEN, StandInHub

        hub, made = StandInHub(), self.row.setdefault("products", {})
        packed, folder = self.run.startswith(("nvfp4", "server")), self.place / "run"
        device = ["--device", "cpu" if self.bench.options.cpu else "cuda"]
        online = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(self.place / "hub")}
        online |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        reference, task = str(self.place / "reference.pt"), self.bench.options.task
        repo = "tester/" + re.sub(r"\W+", "-", f"{self.name.rpartition('/')[2]}-{self.run}").lower()
        small = [file for file in Path(self.model).iterdir() if file.is_file() and file.stat().st_size < 2**24]
        hub.put(self.name, **{file.name: file.read_bytes() for file in small})  # the weights are read from the folder

        def call(name: str, command: list[str], shown: list[str], **environment: str) -> None:
            began = time.perf_counter()
            code, lines, _ = self.bench.call(command, **environment)
            found = json.loads(lines[-1]) if code == 0 and lines and lines[-1].startswith("{") else {}
            row = {"command": self.bench.clean(shlex.join(shown)), "exit_code": code}
            made[name] = row | {"seconds": round(time.perf_counter() - began, 1)} | found
            if found and name != "untrained":
                made[name]["agrees"] = found["kl"] <= KL and found["same_greedy"] >= SAME_GREEDY
            if code:
                made[name]["says"] = lines[-25:]

        def tool(name: str, *arguments: object, **environment: str) -> None:
            said = [str(word) for word in arguments]
            call(name, [sys.executable, "-m", "qerl_trl.cli.main", *said], ["qerl-trl", *said], **environment)

        def script(name: str, *arguments: str, **environment: str) -> None:
            call(name, [sys.executable, __file__, *arguments], ["python", "real_models.py", *arguments], **environment)

        stock = {"PYTHONPATH": self.bench.elsewhere, "VLLM_PLUGINS": ""}
        base = f"{repo}-base" if packed else self.name
        script("untrained", "refer", reference, str(folder), task)
        tool("merge bf16", "merge", folder, self.place / "merged", *device)
        if packed:
            tool("merge base", "merge", folder, self.place / "base", "--as", "base", *device)
            tool("push base", "push", "base", self.place / "base", base, **online)
        tool("push adapter", "push", "adapter", folder, repo, "--base-model", base, **online)
        script("reload merged", "reload", reference, str(self.place / "merged"), **stock)
        script("reload adapter", "reload", reference, base if packed else self.model, repo, **stock, **online)
        wrong = {name: each for name, each in made.items() if each["exit_code"] or not each.get("agrees", True)}
        self.row["passed"] = not wrong
        hub.close()
        self.bench.keep(self.row)
        print(self.name, self.run, "passed" if self.row["passed"] else json.dumps(wrong, indent=1), flush=True)


def markdown() -> str:
    """The table of docs/source/benchmarks.md."""
    record = json.loads(OUT.read_text())
    lines = ["| model | arm | accuracy before -> after, % | reloaded merge: KL, nats | s per step | GPU memory, GiB |"]
    lines += ["|---|---|---|---:|---:|---:|"]
    for row in record["runs"]:
        name = row["model"].rpartition("/")[2]
        before, after = (f"{100 * row[when]['accuracy']:.1f}" for when in ("before", "after"))
        kl, gib = row["products"]["reload merged"]["kl"], row["peak_gib"]
        lines.append(
            f"| {name} | {row['run']} | {before} -> {after} | {kl:.4f} | {row['seconds_per_step']:.1f} | {gib:.1f} |"
        )
    runs = record["runs"]
    passed, kl = sum(row["passed"] for row in runs), max(max(row["curves"]["mismatch_kl"]) for row in runs)
    total, steps = runs[0]["before"]["total"], runs[0]["steps"]
    return (
        "\n".join(lines)
        + f"\n\ngsm_symbolic of reasoning-gym, {steps} steps of 256 completions, {total} held-out problems, one seed, "
        f"several runs at a time on one {record['device']}: accuracies are within each other's intervals, and seconds "
        f"are not to be compared with other tables. {passed} of {len(runs)} were merged, pushed to a stand-in Hub and "
        "loaded again by transformers and PEFT; mismatch KL between vLLM and the trainer was at most "
        f"{kl:.4f} nats per token. The weights were dequantized from 4-bit GGUFs; the original releases were not run "
        f"([{OUT.name}]({OUT.relative_to(ROOT)}) has the commands)."
    )


def noise() -> str:
    """The table of docs/source/noise.md."""
    lines = ["| model | setting | % of the norms' rms | KL at start | KL in rollouts | norms with over 20 % of it |"]
    lines += ["|---|---|---:|---:|---:|---|"]
    records = [json.loads(path.read_text()) for path in sorted((RESULTS / "noise_units").glob("*.json"))]
    kls: dict[str, list[float]] = {}
    for row in sorted((row for record in records for row in record["runs"]), key=lambda row: row["model"]):
        share, expected, found = (row["curves"][key] for key in ("share", "expected_kl", "mismatch_kl"))
        figures = f"{100 * share[0]:.2g} | {expected[0]:.2g} | {sum(found) / len(found):.2g}"
        warned = " (warns)" if any("nats per token" in text for text in row["warnings"]) else ""
        units = re.findall(r"--aqn_(scale|sigma_start|target_kl) (\S+)", row["command"])
        kls.setdefault(units[-1][0] if units[-1][0] == "target_kl" else units[0][1], []).append(sum(found) / len(found))
        named = ", ".join(f"`{norm.removeprefix('model.')}` {size} %" for size, norm in row["dominant"])
        lines.append(f"| {row['model']} | {', '.join(map(' '.join, units))}{warned} | {figures} | {named} |")
    made = "; ".join(sorted({record["device"] for record in records}))
    spread = ", ".join(f"{max(kl) / min(kl):.3g} times with {unit}" for unit, kl in kls.items())
    how = "Nats per token, untrained policies in NVFP4, constant sigma, one to three rollouts."
    return "\n".join(lines) + f"\n\nLargest over smallest KL in rollouts: {spread}. {how} {made}."


def main() -> None:
    if sys.argv[1:2] in (["refer"], ["reload"]):
        return {"refer": refer, "reload": reload}[sys.argv[1]](*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs=3, action="append", metavar=("NAME", "FOLDER", "SHA256"), default=[])
    parser.add_argument("--task", help="YAML file of the task.")
    parser.add_argument("--recipe", default=RECIPE, help="Another one keeps its own settings.")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "real_models")
    parser.add_argument("--parallel", type=int, default=4, help="Runs on the GPU at a time.")
    parser.add_argument("--timeout", type=float, default=420.0, help="Time limit of one command in seconds.")
    parser.add_argument("--cpu", action="store_true", help="The embedded model, two steps, without vLLM.")
    parser.add_argument("--measure-noise", action="store_true", help="Only train.")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="Further options of every run.")
    options = parser.parse_args()
    if options.cpu:
        options.model = [("tester/tiny-qwen2", str(ROOT / "examples/assets/tiny-qwen2"), "")]
        options.task, options.parallel = "arithmetic", 1
        options.runs = [run for run in options.runs if run != "server"]
    elif not options.model or not options.task:
        parser.error("--model and --task are needed, or --cpu.")
    else:
        options.task = str(Path(options.task).resolve())
        options.model = [(name, str(Path(folder).resolve()), gguf) for name, folder, gguf in options.model]
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "" if options.cpu else "0")
    os.environ.setdefault("QERL_SERVER_SECRET", os.urandom(32).hex())
    bench, began = Bench(options), time.perf_counter()

    signal.signal(signal.SIGTERM, common.end_all)
    signal.signal(signal.SIGINT, common.end_all)
    runs = [Run(bench, model, run) for model in options.model for run in options.runs]

    def entire(run: Run) -> None:
        try:
            run.train()
            if run.row["trained"] and not options.measure_noise:
                run.products()
        except Exception as error:  # the other runs continue
            run.row["error"] = bench.clean(f"{type(error).__name__}: {error}")
            bench.keep(run.row)
            print(run.name, run.run, run.row["error"], flush=True)

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(entire, runs))
    passed = sum(run.row["passed"] for run in runs)
    print(f"{passed} of {len(runs)} passed, {time.perf_counter() - began:.0f} s", flush=True)
    sys.exit(passed < len(runs))


if __name__ == "__main__":
    main()
