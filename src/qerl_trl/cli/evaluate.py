"""`qerl-trl eval`: accuracy of a model or run on a benchmark, own data or a task; `report`: a run as one HTML file."""

import contextlib
import dataclasses
import html
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..checkpoint.records import RESULTS_NAME
from ..support.recipes import task_file
from .train import AsJson, note, print_result

if TYPE_CHECKING:
    from datasets import Dataset

    from ..tasks.evaluation import Protocol
    from ..tasks.task import Task


def evaluate(
    model: Annotated[str, typer.Argument(help="Run or checkpoint with an adapter, or folder or Hub id of a model.")],
    task: Annotated[
        str | None, typer.Option(help="YAML file or shipped name: its held-out problems, greedily. Default: the run's.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="gsm8k (default), math500, amc23, aime24, aime25; a file...")] = None,
    engine: Annotated[Literal["transformers", "vllm"], typer.Option(help="Engine that generates.")] = "transformers",
    output: Annotated[Path | None, typer.Option(help="Default: eval-<data>.json in a local model's folder.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: 0.6; of a task 0.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Default: 4096; of a task the run's.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    compute: Annotated[
        Literal["w4a16", "w4a8"] | None,
        typer.Option(help="Products of NVFP4 layers; default: the run's."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Problems at a time (transformers).")] = 64,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy, noise off, with the paper's protocol (temperature 0.6, top-p 0.95, 4096 tokens) or a task's."""
    from qerl_trl.checkpoint import seal
    from qerl_trl.checkpoint.records import public_name
    from qerl_trl.publish.load import format_of, recorded_settings, require_adapter, require_whole
    from qerl_trl.tasks import evaluation

    folder = Path(model)
    adapter = folder if (folder / "adapter_config.json").is_file() else None
    if folder.is_dir() and not (folder / "config.json").is_file():
        require_adapter(folder)
    if adapter:
        require_whole(adapter)
    settings = recorded_settings(folder) if folder.is_dir() else {}
    said = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    chosen, name, measured, problems = _chosen(folder, task, data, settings, said, limit)
    output = _output_file(output, folder, name, limit)
    products: str = compute or (settings.get("options") or {}).get("compute") or "w4a16"
    if compute is None and products != "w4a16" and not adapter and format_of(model) != "nvfp4":
        products = "w4a16"  # the run's dense merge
    asked = model, adapter, measured, chosen, seed, products
    generate, weights = _in_vllm(*asked) if engine == "vllm" else _in_transformers(*asked, batch_size)
    of_task = (measured.verdicts, measured.answer_format) if measured is not None else ()
    result = evaluation.evaluate(chosen, generate, limit, seed, problems, *of_task)
    if measured is not None:
        result["task"] = measured.label
    result.update(model=public_name(model), adapter=adapter is not None, engine=engine, name=name, compute=products)
    if folder.is_dir():  # a card shows results for exactly these weights
        base_sha256 = settings.get("base_sha256") if adapter else None
        result.update(weights_sha256=seal.weights_sha256(model), base_sha256=base_sha256)
    result.update(base_format="nvfp4" if weights == "nvfp4" else "bf16", weights=weights)
    if output is not None:
        seal.write_json_atomically(output, result)
    print_result({key: value for key, value in result.items() if key != "verdicts"}, as_json, _lines(result, output))


def _lines(result: dict[str, Any], output: Path | None) -> list[str]:
    (low, high), protocol = result["interval95"], result["protocol"]
    samples = protocol["samples"]
    weights = f"{result['weights']} weights" + ", activations in FP8" * (result["compute"] == "w4a8")
    lines = [
        f"{result['name']}, {weights}: {100 * result['accuracy']:.1f} % [{100 * low:.1f}, "
        f"{100 * high:.1f}] on {result['total']} problems, {samples} completion{'s' if samples > 1 else ''} each, "
        f"temperature {protocol['temperature']:g}, {result['seconds']:.0f} s"
    ]
    where = " after #### or in a box" if result["answer_format"] == "marked" else ""
    if none := result["without_an_answer"]:
        lines.append(
            f"{none} of {result['total'] * samples} completions state no answer{where}, and count as wrong. If it is "
            "the whole text or the last word, use a --task with answer_format: whole or last."
        )
    return lines if output is None else [*lines, f"written: {output}"]


def _chosen(
    folder: Path, named: str | None, data: str | None, settings: Any, said: dict[str, Any], limit: int | None
) -> tuple["Protocol", str, "Task | None", "Dataset | None"]:
    """Return (protocol, name, task, problems) of the task, `data` or GSM8K. Raises if answers cannot be graded."""
    from qerl_trl.publish.load import recorded_template_kwargs
    from qerl_trl.tasks import evaluation
    from qerl_trl.tasks.grading import require_references
    from qerl_trl.tasks.task import Task

    said = {"chat_template_kwargs": recorded_template_kwargs(settings), **said}
    said = {name: value for name, value in said.items() if value is not None}
    if named is not None and data is not None:
        raise ValueError(f"--task {named} has problems of its own, so --data {data} is not read. Leave one out.")
    own = Task.read(task_file(named)) if named is not None else None
    task = _task_of(folder) if named is None and data is None else own
    if task is not None:
        held_out, name = task.splits()[1], Path(named).stem if named else re.sub(r"\W+", "-", task.label)
        return dataclasses.replace(_protocol_of(task, held_out, settings), **said), name, task, held_out
    name = "gsm8k" if data is None else data if data in evaluation.PROTOCOLS else "local"
    chosen = evaluation.PROTOCOLS.get(name) or evaluation.Protocol(str(data), system_prompt=None, grader="auto")
    chosen = dataclasses.replace(chosen, **said)
    if data is None:
        return chosen, name, None, None
    problems = evaluation.load_problems(chosen, limit)
    require_references(problems["answer"], chosen.grader)
    return chosen, name, None, problems


def _protocol_of(task: "Task", problems: "Dataset", settings: Any) -> "Protocol":
    """Return the protocol of a task: greedy, with the run's completion length."""
    from qerl_trl.tasks.evaluation import Protocol

    if not task.graded(problems):
        raise ValueError(
            f"The task {task.label!r} has tools, an environment or no reference answers: only its training loop can "
            "measure it. Run the training command again: for a finished run it only measures."
        )
    task.graded_by()  # fail on an unknown grader before loading a model
    return Protocol(
        dataset=task.hub_dataset or task.label,
        config=task.dataset_config,
        split=task.held_out_split or "",
        system_prompt=task.system_prompt,
        temperature=0.0,
        max_new_tokens=settings.get("max_completion_length") or Protocol.max_new_tokens,
        grader=task.grader if isinstance(task.grader, str) else "own",
    )


def _in_transformers(
    model: str, adapter: Path | None, task: "Task | None", chosen: "Protocol", seed: int, compute: str, batch_size: int
) -> tuple[Any, str]:
    """Load the model; returns (generation function, format or dtype of the weights)."""
    import torch

    from qerl_trl.nvfp4.linear import compute_dtype, has_nvfp4, set_compute
    from qerl_trl.publish.load import load_any, load_policy
    from qerl_trl.tasks.evaluation import transformers_engine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = load_policy(adapter, device=device) if adapter else load_any(model, device)
    assert policy.tokenizer is not None  # set by both loaders
    if task is not None:
        task.prepared(policy.tokenizer)
    packed = has_nvfp4(policy.transformers_model)
    weights = "nvfp4" if packed else str(compute_dtype(policy.model)).removeprefix("torch.")
    _require_packed(weights, compute)
    set_compute(policy.transformers_model, compute)
    return transformers_engine(policy.model, policy.tokenizer, chosen, batch_size, seed), weights


def _require_packed(weights: str, compute: str) -> None:
    if compute != "w4a16" and weights != "nvfp4":
        raise ValueError(f"--compute {compute} needs NVFP4 weights, and these are {weights}. Leave it out.")


def _in_vllm(
    model: str, adapter: Path | None, task: "Task | None", chosen: "Protocol", seed: int, compute: str
) -> tuple[Any, str]:
    """As [`_in_transformers`], with vLLM, which loads the base as stored, at the run's revision."""
    from transformers import AutoTokenizer

    from qerl_trl.model import loading
    from qerl_trl.nvfp4.checkpoints import METHOD
    from qerl_trl.publish.gguf import folder_of
    from qerl_trl.publish.load import check_served_base, recorded_settings, require_format, stored_as
    from qerl_trl.tasks import evaluation
    from qerl_trl.tasks.task import Task

    base, revision = folder_of(model), None
    if adapter:
        base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
        revision = check_served_base(adapter, base)
        if (wanted := recorded_settings(adapter).get("base_format")) is not None:
            require_format(base, wanted, revision)
    loading.begin(base)
    loading.finish()
    options: dict[str, Any] = {"revision": revision} if revision else {}
    weights = stored_as(base, revision)
    _require_packed(weights, compute)
    if compute != "w4a16":  # vLLM's own kernels for such checkpoints have no FP8 operands
        options |= {"quantization": METHOD, "additional_config": {"qerl": {"compute": compute}}}
    if weights == "float32":  # vLLM would round float32 to 16 bits
        options["dtype"] = weights
    own = adapter if adapter and (adapter / "tokenizer_config.json").is_file() else None
    if own or task is not None:  # vLLM defaults to the base's template; the run may have had another
        tokenizer = AutoTokenizer.from_pretrained(own or base, revision=None if own else revision)
        options["chat_template"] = (task or Task()).prepared(tokenizer).chat_template
    return evaluation.vllm_engine(base, chosen, str(adapter) if adapter else None, seed, **options), weights


def _task_of(model: Path) -> "Task | None":
    """Return the task of the run in `model`, from its command; None for GSM8K, or without results."""
    from qerl_trl.tasks.evaluation import PROTOCOLS
    from qerl_trl.tasks.script import Script

    try:
        results = json.loads((model / RESULTS_NAME).read_text())
    except (OSError, ValueError):
        return None
    named = results.get("task")
    if named is None or results.get("dataset") == PROTOCOLS["gsm8k"].dataset:
        return None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            task = Script.parse(argv=shlex.split(results["command"])[3:]).task
    except (OSError, ValueError, KeyError):
        task = None
    if task is None or task.label != named:
        note(f"The run's task, {named}, is not found here. This measures gsm8k; pass --task FILE for the task.")
        return None
    return task


def _output_file(output: Path | None, model: Path, name: str, limit: int | None) -> Path | None:
    """Return the result's file, checked to be writable; None without `output` for a Hub id or with `--limit`."""
    if output is None:
        if not model.is_dir() or limit is not None:
            return None
        output = model / f"eval-{name}.json"
    if output.is_dir() or not os.access(output.absolute().parent, os.W_OK):
        raise ValueError(f"{output} cannot be written. Name a file in a writable folder: --output FILE.json.")
    return output


# --- report -----------------------------------------------------------------------------------------

REPORT_NAME = "report.html"
#: title of a curve -> (unit, pattern of the logged keys)
_CURVES = {
    "Rewards": ("mean of a rollout", r"reward|rewards/.*/mean"),
    "Noise": ("sigma", r"aqn/sigma|aqn/sigma_effective"),
    "Entropy": ("nats per token", r"entropy|rollout/entropy"),
    "Mismatch of rollout and trainer": ("KL, nats per token", r"rollout/mismatch_kl"),
    "Completions": ("tokens", r"completions/(mean|max)_length"),
    "Groups without a signal, clipped completions": ("share", r"frac_reward_zero_std|completions/clipped_ratio"),
    "Time": ("seconds per step", r"step_time|seconds/\w+"),
    "Memory": ("peak, GiB", r"memory/peak_gib"),
}
_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}figure{display:inline-block;"
    "margin:.5rem 0;width:48%;min-width:20rem}svg{width:100%;height:auto}td,th{border-bottom:1px solid #ccc;"
    "padding:.3rem .6rem;text-align:left;vertical-align:top}pre{white-space:pre-wrap;margin:0}"
)


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of a checkpoint.")],
    output: Annotated[Path | None, typer.Option(help="Default: report.html in the folder.")] = None,
    completions: Annotated[int, typer.Option(min=0, help="Sampled completions to show per logged step.")] = 2,
) -> None:
    """Write one HTML file of a run: curves, accuracy, completions (log_completions=True) and settings."""
    results, log = {}, []
    if (run / RESULTS_NAME).is_file():
        results = json.loads((run / RESULTS_NAME).read_text())
        log = results["log_history"]
    elif state := max(run.glob("**/trainer_state.json"), key=os.path.getmtime, default=None):
        log = json.loads(state.read_text())["log_history"]
    if not log:
        raise ValueError(f"{run} has neither {RESULTS_NAME} nor trainer_state.json. Pass the folder of a run.")
    parts = [f"<h1>{html.escape(results.get('task') or run.name)}</h1>"]
    for name in ("before", "after"):
        if shown := results.get(name):
            low, high = shown["interval95"]
            accuracy = f"{100 * shown['accuracy']:.1f} % [{100 * low:.1f}, {100 * high:.1f}] of {shown['total']}"
            parts.append(f"<p>Held-out accuracy {name} training: {accuracy}</p>")
    parts += [f"<figure>{curve}</figure>" for curve in _curves(log)]
    parts += _sampled(run, completions)
    for title, rows in (("Settings", results.get("settings", {})), ("Versions", results.get("versions", {}))):
        lines = (f"<tr><th>{html.escape(name)}<td>{html.escape(str(value))}" for name, value in rows.items())
        parts.append(f"<h2>{title}</h2><table>{''.join(lines)}</table>" if rows else "")
    parts.append(f"<h2>Command</h2><pre>{html.escape(results.get('command', ''))}</pre>")
    file = output or run / REPORT_NAME
    head = f"<!doctype html><meta charset=utf-8><title>{html.escape(run.name)}</title><style>{_STYLE}</style>"
    file.write_text(head + "\n".join(parts))
    print(f"written: {file}")


def _curves(log: list[dict[str, Any]]) -> Iterator[str]:
    """Yield an SVG for each group of logged values."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("report draws with matplotlib, which is missing: pip install matplotlib") from error
    for title, (unit, pattern) in _CURVES.items():
        keys = sorted({key for entry in log for key in entry if re.fullmatch(pattern, key)})
        if len(keys) == 2 and keys[0] == "reward":
            keys = keys[1:]  # the total of one reward is drawn once
        figure, drawn = Figure(figsize=(6, 3), layout="constrained"), 0
        axes = figure.add_subplot(xlabel="step", ylabel=unit, title=title)
        for key in keys:
            points = [(entry["step"], entry[key]) for entry in log if entry.get(key) is not None and "step" in entry]
            drawn += len(points)
            axes.plot(*zip(*points, strict=True), label=key, marker="." if len(points) < 30 else "")
        if drawn:
            axes.legend(fontsize="small")
            axes.grid(alpha=0.3)
            text = io.StringIO()
            figure.savefig(text, format="svg")
            yield text.getvalue()[text.getvalue().index("<svg") :]


def _text(value: Any) -> str:
    """Return a text, or the last message of a conversation."""
    return value if isinstance(value, str) else str(value[-1]["content"])


def _sampled(run: Path, count: int) -> list[str]:
    """Return a table of TRL's logged completions: the best and the worst ones of each step."""
    if not count or not (files := sorted((run / "completions").glob("*.parquet"))):
        return []
    import pandas

    rows = []
    for file in files:
        table = pandas.read_parquet(file)
        table = table.sort_values("advantage" if "advantage" in table else "step", ascending=False)
        for row in pandas.concat([table.head(count - count // 2), table.tail(count // 2)]).to_dict("records"):
            scores = ", ".join(f"{name} {row[name]:.3g}" for name in row if isinstance(row[name], float))
            cells = "".join(f"<pre>{html.escape(_text(row[name]))}</pre><td>" for name in ("prompt", "completion"))
            rows.append(f"<tr><td>{row.get('step', '')}<td>{cells}{scores}")
    return ["<h2>Completions</h2><table><tr><th>step<th>prompt<th>completion<th>scores", *rows, "</table>"]
