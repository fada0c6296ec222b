"""Commands that run a model: train, eval."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..publish.records import RESULTS_NAME
from ..shipped import accelerate_file, config_file, examples_folder, task_file
from .options import (
    AccelerateConfig,
    AllowOtherBase,
    AsJson,
    BaseFormat,
    BaseModel,
    Dtype,
    NumProcesses,
    TrustRemoteCode,
    note,
    print_result,
)


def train(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Option(help="YAML file; a bare name is looked up in the shipped configs. Default: by machine."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="YAML file of a task, or the name of a shipped one. Default: what the configuration says."),
    ] = None,
    num_processes: NumProcesses = None,
    accelerate_config: AccelerateConfig = None,
) -> None:
    """Train with examples/grpo_gsm8k.py. Further options go to it: any field of QeRLConfig, TRL's ModelConfig and of a task."""
    arguments = list(context.args)
    if task is not None:
        arguments += ["--task", str(task_file(task))]
    if config is not None:
        arguments += ["--config", str(config_file(config))]
    command = example_command(arguments, num_processes, accelerate_config)
    sys.stdout.flush()
    os.execv(command[0], command)  # the run gets our signals, and its exit code is ours


def example_command(
    arguments: list[str], num_processes: int | None = None, accelerate_config: str | None = None
) -> list[str]:
    """The command line that trains with the example script."""
    launcher = [sys.executable]
    if accelerate_config is not None or (num_processes or 1) > 1:
        launcher += ["-m", "accelerate.commands.launch"]
    if accelerate_config is not None:
        launcher += ["--config_file", str(accelerate_file(accelerate_config))]
    if num_processes is not None and len(launcher) > 1:
        launcher += ["--num_processes", str(num_processes)]
    return [*launcher, str(examples_folder() / "grpo_gsm8k.py"), *arguments]


def evaluate(
    model: Annotated[str, typer.Argument(help="Run or checkpoint with an adapter, or folder or Hub id of a model.")],
    protocol: Annotated[
        str | None,
        typer.Option(help="gsm8k, math500, amc23, aime24, aime25, or local. Default: gsm8k; local with --data."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="The held-out problems of this task: its YAML file, or the name of a shipped one. Greedily and as long as the run's completions, unless said."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Own problems: a file, folder with test.jsonl, or Hub id (question, answer).")
    ] = None,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    output: Annotated[
        Path | None,
        typer.Option(help="JSON file for the result. Default: eval-<protocol>.json in a local model's folder."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Completions per problem. Default: the protocol's.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the protocol's (0.6).")] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: the protocol's (0.95).")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Default: the protocol's (4096).")] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="System message; '' for none. Default: the protocol's.")
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help="JSON for the chat template, such as '{\"enable_thinking\": false}'. Default: what the run recorded."
        ),
    ] = None,
    grader: Annotated[
        str | None,
        typer.Option(
            help="auto, exact, numeric, math, or file.py:function. Default: the protocol's; auto for local data."
        ),
    ] = None,
    answer_format: Annotated[
        str | None,
        typer.Option(
            help="Where an answer stands: marked (after #### or in a box) or whole (all that is said). Default: marked, or the task's."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Problems at a time (transformers).")] = 64,
    base_model: BaseModel = None,
    base_format: BaseFormat = None,
    allow_other_base: AllowOtherBase = False,
    dtype: Dtype = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda or cuda:<i>. Default: cuda where there is one (--engine vllm has its own)."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    harness: Annotated[
        bool, typer.Option("--harness", help="Only print the commands for lm-eval and lighteval.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy, noise off: with the paper's protocol (temperature 0.6, top-p 0.95, 4096 tokens), or of a --task as its run does."""
    import dataclasses

    import torch
    from transformers import AutoTokenizer

    from qerl_trl import checkpoint, loading
    from qerl_trl.nvfp4.linear import compute_dtype, has_nvfp4
    from qerl_trl.publish.names import public_name
    from qerl_trl.publish.run import (
        check_served_base,
        load_any,
        load_policy,
        recorded_settings,
        require_format,
        require_model,
        require_whole,
        stored_as,
    )
    from qerl_trl.tasks import evaluation
    from qerl_trl.tasks.grading import require_references
    from qerl_trl.tasks.task import Task, require_answer_format

    adapter = Path(model) if (Path(model) / "adapter_config.json").is_file() else None
    if harness:
        commands = evaluation.harness_commands(base_model or model, model if adapter else None, base_model)
        print_result(commands, as_json, [f"# {name}\n{command}" for name, command in commands.items()])
        return
    if Path(model).is_dir():
        require_model(Path(model))
    if base_model is not None and adapter is None:
        raise ValueError(
            f"--base-model {base_model} is the base of an adapter, and {model} has none (no adapter_config.json): the model would be measured as it is, "
            "and the base not at all. Name the run's folder or a checkpoint in it, or leave --base-model out."
        )
    if answer_format is not None:
        require_answer_format(answer_format, "--answer-format")
    if engine not in ("transformers", "vllm"):
        raise ValueError(f"--engine {engine} is unknown; choose transformers or vllm.")
    run_task = _task_of(Path(model))
    if run_task is not None and (task, data, protocol) == (None, None, None):
        note(f"The run was measured on its task, {run_task}. This measures gsm8k; --task FILE measures that.")
    device = device or ("cuda" if engine == "transformers" and torch.cuda.is_available() else "cpu")
    measured_task = problems = None
    if task is not None:
        if data is not None or protocol is not None:
            raise ValueError("--task has data and grader of its own: leave --data and --protocol out.")
        measured_task, chosen = Task.read(task_file(task)), evaluation.Protocol("", system_prompt=None, temperature=0.0)
        if grader is not None:
            measured_task.grader = grader
        measured_task.answer_format = answer_format or measured_task.answer_format
        problems = measured_task.splits()[1]
        if not measured_task.graded(problems):
            raise ValueError(
                f"--task {task} is played with tools or an environment, or has no reference answers: only its training loop can measure it. Start "
                "the command that trained the run again: a finished run is measured again."
            )
        measured_task.graded_by()  # a name that leads nowhere is said before a model is loaded
        longest = recorded_settings(Path(model)).get("max_completion_length") if Path(model).is_dir() else None
        chosen = dataclasses.replace(
            chosen,
            dataset=measured_task.hub_dataset or measured_task.label,
            config=measured_task.dataset_config,
            split=measured_task.held_out_split or "",
            system_prompt=measured_task.system_prompt,
            grader=measured_task.grader if isinstance(measured_task.grader, str) else "own",
        )
        protocol = Path(task).stem
        if longest is not None:
            chosen = dataclasses.replace(chosen, max_new_tokens=longest)
    elif (protocol := protocol or ("gsm8k" if data is None else "local")) == "local" or data is not None:
        if data is None:
            raise ValueError(
                "--protocol local needs --data: a file (.jsonl, .csv), a folder with test.jsonl, or a Hub id."
            )
        chosen = evaluation.Protocol(data, system_prompt=None, grader="auto")
        if protocol in evaluation.PROTOCOLS:
            chosen = dataclasses.replace(evaluation.PROTOCOLS[protocol], dataset=data, config=None)
    elif protocol in evaluation.PROTOCOLS:
        chosen = evaluation.PROTOCOLS[protocol]
    else:
        raise ValueError(f"--protocol {protocol} is none of {', '.join(evaluation.PROTOCOLS)}, local.")
    given: dict[str, Any] = {
        "chat_template_kwargs": _template_kwargs(chat_template_kwargs, Path(model)),
        "samples": samples,
        "temperature": temperature,
        "top_p": top_p,
        "max_new_tokens": max_new_tokens,
        "grader": grader,
    }
    chosen = dataclasses.replace(chosen, **{name: value for name, value in given.items() if value is not None})
    if system_prompt is not None and task is not None:
        raise ValueError("--system-prompt and --task exclude each other: the task has one. Say it in the task's file.")
    if system_prompt is not None:
        chosen = dataclasses.replace(chosen, system_prompt=system_prompt or None)

    if adapter:
        require_whole(adapter)
    stated = answer_format or "marked" if measured_task is None else measured_task.answer_format
    if data is not None:  # what is not there is said before a model is loaded, and before what is in the way
        problems = evaluation.load_problems(chosen, limit)
        require_references(problems["answer"], chosen.grader, stated == "whole")
    output = _output_file(output, Path(model), protocol, chosen.dataset, limit, chosen.samples, stated)

    if engine == "vllm":
        base, revision = model, None
        if adapter:
            base = base_model or _base_of(adapter)
            revision = check_served_base(adapter, base, device, allow_other_base, trust_remote_code)
            wanted = base_format or recorded_settings(adapter).get("base_format")
            if wanted is not None:  # vLLM serves it as it is stored
                require_format(base, wanted, revision, trust_remote_code)
        elif base_format is not None:
            require_format(base, base_format, None, trust_remote_code)
        loading.begin(base)
        loading.finish()
        base_sha256 = None if allow_other_base else recorded_settings(adapter or Path(model)).get("base_sha256")
        options: dict[str, Any] = {"revision": revision} if revision else {}
        options |= {"trust_remote_code": True} if trust_remote_code else {}
        weights = stored_as(base, revision, trust_remote_code)
        if dtype or weights == "float32":  # which vLLM would round to 16 bits by itself
            options["dtype"] = dtype or weights
            weights = weights if weights == "nvfp4" else options["dtype"]
        own = adapter if adapter and (adapter / "tokenizer_config.json").is_file() else None
        if own or measured_task is not None:  # vLLM takes the base's template, which the run may not have had
            tokenizer = AutoTokenizer.from_pretrained(
                own or base, revision=None if own else revision, trust_remote_code=trust_remote_code
            )
            options["chat_template"] = (measured_task or Task()).prepared(tokenizer).chat_template
        generate = evaluation.vllm_engine(base, chosen, str(adapter) if adapter else None, seed, **options)
    else:
        if adapter:
            policy = load_policy(
                adapter, base_model, base_format, dtype, device, allow_other_base, trust_remote_code=trust_remote_code
            )
        else:
            policy = load_any(model, device, dtype, base_format, trust_remote_code)
        assert policy.tokenizer is not None  # both bring one
        base_sha256 = policy.settings.get("base_sha256")
        if measured_task is not None:
            measured_task.prepared(policy.tokenizer)
        weights = (
            "nvfp4" if has_nvfp4(policy.transformers_model) else str(compute_dtype(policy.model)).removeprefix("torch.")
        )
        generate = evaluation.transformers_engine(policy.model, policy.tokenizer, chosen, batch_size, seed)
    if measured_task is not None:
        result = evaluation.evaluate(chosen, generate, limit, seed, problems, measured_task.verdicts, stated)
        result["task"] = measured_task.label
    else:
        result = evaluation.evaluate(chosen, generate, limit, seed, problems, answer_format=stated)
    result.update(model=public_name(model), adapter=adapter is not None, engine=engine, name=protocol)
    if Path(model).is_dir():  # what a card compares, which shows it for this model only
        result.update(weights_sha256=checkpoint.weights_sha256(model), base_sha256=base_sha256 if adapter else None)
    result.update(base_format="nvfp4" if weights == "nvfp4" else "bf16", weights=weights)
    if output is not None:
        checkpoint.write_json_atomically(output, result)
    low, high = result["interval95"]
    lines = [
        f"{protocol}, {weights} weights: {100 * result['accuracy']:.1f} % [{100 * low:.1f}, {100 * high:.1f}] on {result['total']} problems, "
        f"{chosen.samples} completion{'s' if chosen.samples > 1 else ''} each, temperature {chosen.temperature:g}, {result['seconds']:.0f} s"
    ]
    asked = result["total"] * chosen.samples
    if none := result["without_an_answer"]:
        advice = (
            " If an answer is all that is said: --answer-format whole, or --task, which says so itself. Others were cut off (--max-new-tokens), or were "
            "not told how to answer."
        )
        lines.append(
            f"{none} of {asked} completions state no answer after #### or in a box, and count as wrong.{advice * (2 * none > asked)}"
        )
    if output is not None:
        lines.append(f"written: {output}")
    print_result({key: value for key, value in result.items() if key != "verdicts"}, as_json, lines)


def _task_of(model: Path) -> str | None:
    """What the run that made `model` was measured on, as its results say, where that is not GSM8K."""
    from qerl_trl.tasks.evaluation import PROTOCOLS

    try:
        results = json.loads((model / RESULTS_NAME).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(results, dict) or results.get("dataset") == PROTOCOLS["gsm8k"].dataset:
        return None
    return results.get("task")


def _require_writable(output: Path) -> None:
    if not os.access(output.absolute().parent, os.W_OK):
        raise ValueError(
            f"The result is to be written to {output}, and this user may not write there. Name a file elsewhere: --output FILE.json."
        )


def _output_file(
    output: Path | None, model: Path, protocol: str, dataset: str, limit: int | None, samples: int, answer_format: str
) -> Path | None:
    """Where the result is written, before anything is measured.

    Raises:
        `ValueError`: nothing can be written there, or a measurement of the same weights is there that this one would be less than, or that is of other problems or answers.
    """
    if output is not None:
        if output.is_dir() or not output.absolute().parent.is_dir():
            what = "is a folder" if output.is_dir() else "is in a folder that is not there"
            raise ValueError(
                f"--output {output} {what}, so the result could not be written. Name a file in a folder that is there."
            )
        _require_writable(output)
        return output
    if not model.is_dir():
        return None
    from qerl_trl import checkpoint

    output = model / f"eval-{protocol}.json"
    _require_writable(output)
    try:
        there = json.loads(output.read_text())
    except (OSError, ValueError):  # nothing there that could be lost
        return output
    rows = there.get("verdicts") if isinstance(there, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return output  # no measurement of ours
    before, now = sum(map(len, rows)), samples * (len(rows) if limit is None else min(limit, len(rows)))
    other = os.path.realpath(str(there.get("dataset"))) != os.path.realpath(
        dataset
    )  # of names of files, and of data sets alike
    # an older version's file does not say how its task's answers were read
    read_as = there.get("answer_format", answer_format if "task" in there else "marked")
    if other:
        by, this = f"on {there.get('dataset')}", f"on {dataset}"
    elif read_as != answer_format:
        by, this = f"with answers read as {read_as}", f"as {answer_format}"
    else:
        by, this = f"by {before} completions", f"by {now}"
    another = other or read_as != answer_format or now < before
    if another and there.get("weights_sha256") == checkpoint.weights_sha256(model):
        raise ValueError(
            f"{output} has a measurement of these weights {by}, and one {this} would replace it, in the model's card too. Name another file (--output), or "
            "move that one away."
        )
    return output


def _template_kwargs(said: str | None, model: Path) -> dict[str, Any] | None:
    """What is said of the chat template, else what the run that made `model` recorded of it."""
    from qerl_trl.publish.run import recorded_settings, recorded_template_kwargs

    if said is None:
        return recorded_template_kwargs(recorded_settings(model)) if model.is_dir() else None
    try:
        parsed = json.loads(said)
    except json.JSONDecodeError as error:
        raise ValueError(f"--chat-template-kwargs {said} is no JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"--chat-template-kwargs {said} is no JSON object of names and values.")
    return parsed


def _base_of(adapter: Path) -> str:
    """Folder or Hub id of the model that an adapter was trained on, as its configuration says."""
    return json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
