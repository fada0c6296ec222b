"""`qerl-trl eval`: accuracy of a model or a run on a benchmark, own data or a task."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import sys
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
