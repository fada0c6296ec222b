"""The command line `qerl-trl`. Heavy imports happen inside the commands, so that `--help` is instant.

Exit codes: 0 done; 1 it failed (a file, the hub, a run); 2 the request cannot work (wrong option or input). Results go to standard output
(as JSON with `--json`), everything else to standard error.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    help="Reinforcement learning of LLMs on a frozen 4-bit (NVFP4) base: train, measure, merge, quantize, publish.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # its tracebacks can show local variables, and one of them is the Hub token
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing destination, once the new one is complete.")
]
BaseModel = Annotated[str | None, typer.Option(help="Folder or Hub id of the base. Default: what the adapter says.")]
BaseFormat = Annotated[
    str | None, typer.Option(help="nvfp4 or bf16: the base's format. Default: what the run recorded.")
]
Dtype = Annotated[
    str | None, typer.Option(help="Compute dtype of the policy. Default: what the run recorded, else bfloat16.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:<i>.")]
DatasetName = Annotated[str | None, typer.Option("--dataset", help="Training data to name in the card.")]


def main() -> None:
    """Entry point: runs a command, and turns the errors we raise on purpose into one message and an exit code."""
    try:
        app()
    except ValueError as error:  # the user's input
        _fail(error, 2)
    except (RuntimeError, OSError, ImportError) as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        _fail("Interrupted. Destinations hold the old content or the new one; the same command continues.", 130)


def _fail(message: object, code: int) -> NoReturn:
    text = str(message)
    token = os.environ.get("HF_TOKEN")
    print(f"qerl-trl: {text.replace(token, '<token>') if token else text}", file=sys.stderr)
    sys.exit(code)


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _result(content: dict[str, Any], as_json: bool, lines: list[str]) -> None:
    print(json.dumps(content, indent=1) if as_json else "\n".join(lines))


@contextmanager
def _bar(description: str) -> Iterator[Any]:
    """A progress bar in bytes; call with (bytes since the last call, bytes in total or None)."""
    from tqdm import tqdm

    with tqdm(desc=description, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar:

        def update(size: int, total: int | None = None) -> None:
            if total is not None and bar.total != total:
                bar.total = total
            bar.update(size)

        yield update


# --- making -----------------------------------------------------------------------------------------------------------------------


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a bf16 model.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write (compressed-tensors NVFP4).")],
    scale_rule: Annotated[str, typer.Option(help="rtn, four_over_six or neighbor_sweep.")] = "rtn",
    skip: Annotated[
        list[str] | None, typer.Option(help="Linear layers to leave dense: names or patterns. Repeatable.")
    ] = None,
    device: Device = "cpu",
    workers: Annotated[int | None, typer.Option(help="Layers worked on at a time. Default: by the machine.")] = None,
    max_shard_gb: Annotated[float, typer.Option(help="Size of a shard, in GB.")] = 2.0,
    overwrite: Overwrite = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code from the repository.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Quantize a model to NVFP4, readable by transformers and vLLM. Killed? The same command continues."""
    from qerl_trl import cards, offline

    with _bar("quantizing") as progress:
        done = offline.quantize_folder(
            model,
            destination,
            scale_rule,
            skip,
            device,
            workers,
            int(max_shard_gb * 1e9),
            overwrite,
            trust_remote_code,
            card=lambda folder, run: cards.write(folder, cards.facts_of_quantization(folder, run), run),
            progress=progress,
        )
    worst = max(done.layers, key=lambda layer: layer["nmse"])
    content = {
        "destination": str(destination),
        "weights": done.weights,
        "layers": len(done.layers),
        "nmse": done.nmse,
        "worst_layer": worst["name"],
        "worst_nmse": worst["nmse"],
        "source_bytes": done.source_bytes,
        "written_bytes": done.written_bytes,
        "not_quantized": done.skipped,
    }
    lines = [
        f"{done.weights:,} weights in {len(done.layers)} layers, {done.source_bytes / 1e9:.2f} GB -> {done.written_bytes / 1e9:.2f} GB",
        f"relative squared error {done.nmse:.3g}, worst {worst['nmse']:.3g} in {worst['name']} (all: {offline.REPORT_NAME})",
        f"left dense: {', '.join(done.skipped) or 'nothing'}",
        f"written: {destination}",
    ]
    _result(content, as_json, lines)


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="Checkpoint, output folder of a run, or exported adapter.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    form: Annotated[
        str,
        typer.Option(
            "--as",
            help="bf16: base + adapter, dense. nvfp4: that, rounded to 4 bits again. base: the NVFP4 base. adapter: plain PEFT.",
        ),
    ] = "bf16",
    base_model: BaseModel = None,
    base_format: BaseFormat = None,
    onto_original: Annotated[
        bool,
        typer.Option(
            "--onto-original", help="Merge onto the unquantized base: another model than was trained. Needs --prompts."
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Held-out problems (.jsonl): measure the distance of the result to the trained policy."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write an NVFP4 merge even if next to nothing of the adapter survives.")
    ] = False,
    dataset: DatasetName = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Turn a run into something to publish: merged model, adapter or base, with a card."""
    if form not in ("bf16", "nvfp4", "base", "adapter"):
        raise ValueError(f"--as {form} is unknown; choose bf16, nvfp4, base or adapter.")
    if onto_original and (form != "bf16" or prompts is None):
        raise ValueError(
            "--onto-original makes another model than was trained, so it is for --as bf16 only and has to be measured: add --prompts FILE.jsonl."
        )
    from qerl_trl import cards, export
    from qerl_trl.distance import logit_distance, logits_of, prompt_batches
    from qerl_trl.policy import load_any, load_policy

    policy = load_policy(run, base_model, base_format, dtype, device)
    measured = None
    if prompts is not None:
        batches = prompt_batches(prompts, policy.tokenizer)
        trained = logits_of(policy.model, batches)
        if onto_original:
            if policy.settings["merged_onto"] != "nvfp4":
                raise ValueError(
                    "This adapter was trained on the unquantized base: a plain merge is already what --onto-original asks for."
                )
            settings = policy.settings
            del policy
            policy = load_policy(run, base_model, "bf16", dtype, device)
            policy.settings["base_format"] = settings.get("base_format", "nvfp4")
            measured = logit_distance(trained, logits_of(policy.model, batches))
    facts = cards.facts_of_run(run, {"kind": "adapter", "settings": policy.settings}, dataset)

    def card(folder: Path, described: dict[str, Any]) -> None:
        cards.write(folder, facts, described)

    with _bar("writing") as progress:
        if form == "adapter":
            done = export.save_adapter(policy, destination, base_model=base_model, overwrite=overwrite, card=card)
        elif form == "base":
            done = export.save_base(policy, destination, overwrite=overwrite, card=card, progress=progress)
        elif form == "nvfp4":
            rule = policy.settings.get("scale_rule", "rtn")
            done = export.save_merged_nvfp4(
                policy,
                destination,
                scale_rule=rule,
                force=force,
                overwrite=overwrite,
                card=card,
                progress=progress,
                say=_note,
            )
        else:
            extra = {"measured": measured} if measured else None
            done = export.save_merged(
                policy, destination, extra=extra, overwrite=overwrite, card=card, progress=progress
            )
    content: dict[str, Any] = {
        "destination": str(destination),
        "kind": done["kind"],
        **{k: done[k] for k in ("survived",) if k in done},
    }
    lines = [f"written: {destination} ({done['kind'].replace('_', ' ')})"]
    if prompts is not None and form in ("bf16", "nvfp4"):
        written = load_any(
            str(destination), device, policy.settings["dtype"]
        )  # same arithmetic: only the weights differ
        measured = measured or logit_distance(trained, logits_of(written.model, batches))
        content["measured"] = measured
        lines.append(
            f"distance to the trained policy on {measured['tokens']} tokens: mean logit {measured['mean_logit_distance']:.3g}, KL "
            f"{measured['kl_nats_per_token']:.3g} nats a token, same greedy token {100 * measured['same_greedy_token']:.1f} %"
        )
    _result(content, as_json, lines)


# --- publishing -------------------------------------------------------------------------------------------------------------------


@app.command()
def push(
    what: Annotated[str, typer.Argument(help="adapter, merged or base.")],
    source: Annotated[Path, typer.Argument(help="Folder made by merge or quantize; a run's folder for an adapter.")],
    repo_id: Annotated[str, typer.Argument(help="user/name on the Hub.")],
    public: Annotated[bool, typer.Option("--public", help="Visible to everybody. Default: private.")] = False,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the base, when the run used a local folder.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Publish into a repository that holds something else.")
    ] = False,
    dataset: DatasetName = None,
    as_json: AsJson = False,
) -> None:
    """Publish to the Hugging Face Hub: announced first, private by default, all or nothing. Interrupted? Run it again."""
    kinds = {
        "adapter": ("adapter",),
        "merged": ("merged", "merged_other_base", "nvfp4_merged"),
        "base": ("nvfp4_base",),
    }
    if what not in kinds:
        raise ValueError(f"{what!r} is none of {', '.join(kinds)}.")
    from qerl_trl import hub, shards

    kind = shards.manifest_run(source).get("kind")
    if kind is None and what == "adapter":
        from qerl_trl import cards, export
        from qerl_trl.policy import run_settings

        if base_model is None:
            named = json.loads((source / "adapter_config.json").read_text()).get("base_model_name_or_path") or ""
            hub.require_hub_base(named)
        settings = run_settings(source)
        facts = cards.facts_of_run(source, {"kind": "adapter", "settings": settings}, dataset)
        folder = source / f"_hub-adapter-{repo_id.replace('/', '--')}"
        export.copy_adapter(source, folder, lambda partial, run: cards.write(partial, facts, run))
        source = folder
    elif kind not in kinds[what]:
        held = f"a {kind.replace('_', ' ')}" if kind else "no export of qerl-trl"
        raise ValueError(
            f"{source} holds {held}, not something to push as {what}. Make one with qerl-trl merge or qerl-trl quantize."
        )
    url = hub.push_folder(source, repo_id, not public, revision=revision, base_model=base_model, force=force, say=_note)
    _result({"url": url, "repo_id": repo_id, "private": not public}, as_json, [url])


# --- running ----------------------------------------------------------------------------------------------------------------------


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    config: Annotated[
        str | None,
        typer.Option(help="YAML file; a bare name is looked up in the shipped configs. Default: by machine."),
    ] = None,
    num_processes: Annotated[int, typer.Option(help="Processes (GPUs), through accelerate launch.")] = 1,
) -> None:
    """Train with examples/grpo_gsm8k.py. Further options go to it: any field of QeRLConfig and TRL's ModelConfig."""
    examples = examples_folder()
    arguments = list(context.args)
    if config is not None:
        found = next(
            (
                p
                for p in (Path(config), examples / "configs" / config, examples / "configs" / f"{config}.yaml")
                if p.is_file()
            ),
            None,
        )
        if found is None:
            shipped = ", ".join(sorted(p.stem for p in (examples / "configs").glob("*.yaml")))
            raise ValueError(f"--config {config} is no file, and not one of the shipped ones: {shipped}.")
        arguments += ["--config", str(found)]
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "accelerate.commands.launch", "--num_processes", str(num_processes)]
    command = [*launcher, str(examples / "grpo_gsm8k.py"), *arguments]
    sys.stdout.flush()
    os.execv(command[0], command)  # the run gets our signals, and its exit code is ours


def examples_folder() -> Path:
    """Where the example script, its configs and the embedded model are: in the wheel, or in a source checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "examples", here.parents[1] / "examples"):
        if (folder / "grpo_gsm8k.py").is_file():
            return folder
    raise RuntimeError(f"examples/grpo_gsm8k.py is neither in {here} nor in a source checkout. Reinstall qerl-trl.")


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Run or checkpoint with an adapter, or folder or Hub id of a model.")],
    protocol: Annotated[str, typer.Option(help="gsm8k, math500, amc23, aime24, aime25, or local.")] = "gsm8k",
    data: Annotated[
        str | None, typer.Option(help="Own problems: .jsonl, folder with test.jsonl, or Hub id (question, answer).")
    ] = None,
    engine: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    output: Annotated[
        Path | None,
        typer.Option(help="JSON file for the result. Default: eval-<protocol>.json in a local model's folder."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first problems.")] = None,
    samples: Annotated[int | None, typer.Option(help="Completions a problem. Default: the protocol's.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the protocol's (0.6).")] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: the protocol's (0.95).")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Default: the protocol's (4096).")] = None,
    system_prompt: Annotated[
        str | None, typer.Option(help="System message; '' for none. Default: the protocol's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Problems at a time (transformers).")] = 64,
    base_model: BaseModel = None,
    base_format: BaseFormat = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    harness: Annotated[
        bool, typer.Option("--harness", help="Only print the commands for lm-eval and lighteval.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy with the paper's protocol (temperature 0.6, top-p 0.95, 4096 tokens), noise off."""
    import dataclasses

    from qerl_trl import checkpoint, evaluation
    from qerl_trl.policy import load_any, load_policy, public_name, run_settings

    adapter = Path(model) if (Path(model) / "adapter_config.json").is_file() else None
    if harness:
        base = base_model or (
            json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] if adapter else model
        )
        commands = evaluation.harness_commands(base, str(adapter) if adapter else None)
        _result(commands, as_json, [f"# {name}\n{command}" for name, command in commands.items()])
        return
    if engine not in ("transformers", "vllm"):
        raise ValueError(f"--engine {engine} is unknown; choose transformers or vllm.")
    if protocol == "local" or data is not None:
        if data is None:
            raise ValueError("--protocol local needs --data: a .jsonl file, a folder with test.jsonl, or a Hub id.")
        chosen = evaluation.Protocol(data, system_prompt=None)
        if protocol in evaluation.PROTOCOLS and protocol != "gsm8k":
            chosen = dataclasses.replace(evaluation.PROTOCOLS[protocol], dataset=data, config=None)
        protocol = "local" if protocol == "gsm8k" else protocol
    elif protocol in evaluation.PROTOCOLS:
        chosen = evaluation.PROTOCOLS[protocol]
    else:
        raise ValueError(f"--protocol {protocol} is none of {', '.join(evaluation.PROTOCOLS)}, local.")
    given = {"samples": samples, "temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
    chosen = dataclasses.replace(chosen, **{name: value for name, value in given.items() if value is not None})
    if system_prompt is not None:
        chosen = dataclasses.replace(chosen, system_prompt=system_prompt or None)

    if engine == "vllm":
        base = model
        if adapter:
            base = base_model or json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
            recorded = base_format or run_settings(adapter).get("base_format")
            if recorded == "nvfp4" and not (Path(base) / "config.json").is_file():
                _note(
                    f"Serving the adapter on {base} as it is stored; it was trained on NVFP4. Pass an NVFP4 folder as --base-model."
                )
        generate = evaluation.vllm_engine(base, chosen, str(adapter) if adapter else None, seed)
    else:
        if adapter:
            source = load_policy(adapter, base_model, base_format, dtype, device)
        else:
            source = load_any(model, device, dtype)
        generate = evaluation.transformers_engine(
            source.model, source.tokenizer, chosen, batch_size, seed, progress=sys.stderr.isatty()
        )
    result = evaluation.evaluate(chosen, generate, limit, seed)
    result.update(model=public_name(model), adapter=adapter is not None, engine=engine, name=protocol)
    if output is None and Path(model).is_dir():
        output = Path(model) / f"eval-{protocol}.json"
    if output is not None:
        checkpoint.write_json_atomically(output, result)
    low, high = result["interval95"]
    lines = [
        f"{protocol}: {100 * result['accuracy']:.1f} % [{100 * low:.1f}, {100 * high:.1f}] on {result['total']} problems, "
        f"{chosen.samples} completion{'s' if chosen.samples > 1 else ''} each, temperature {chosen.temperature:g}, {result['seconds']:.0f} s"
    ]
    if output is not None:
        lines.append(f"written: {output}")
    _result({key: value for key, value in result.items() if key != "verdicts"}, as_json, lines)


# --- asking -----------------------------------------------------------------------------------------------------------------------


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Folder or Hub id; only its config.json is read.")],
    gpu_gib: Annotated[float, typer.Option(help="Memory of one GPU, in GiB.")] = 80.0,
    batch: Annotated[int, typer.Option(help="Sequences of one backward pass.")] = 8,
    prompt_length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    completion_length: Annotated[int, typer.Option(help="Tokens of a completion.")] = 4096,
    completions: Annotated[int, typer.Option(help="Sequences sampled at a time.")] = 128,
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapter.")] = 32,
    optimizer: Annotated[str, typer.Option(help="adamw_torch, adamw_8bit, adafactor or sgd.")] = "adamw_torch",
    base_format: Annotated[str, typer.Option(help="nvfp4, bf16 or nf4.")] = "nvfp4",
    gradient_checkpointing: Annotated[bool, typer.Option(help="Recompute activations in the backward pass.")] = True,
    vllm: Annotated[bool, typer.Option(help="Roll out in vLLM (else transformers).")] = True,
    as_json: AsJson = False,
) -> None:
    """Predict the memory of a run from shapes alone, say what fits, and suggest a batch size."""
    import dataclasses

    from qerl_trl import plan as planning

    shape = planning.shape_of(model)
    work = planning.Workload(
        batch,
        prompt_length,
        completion_length,
        completions,
        lora_rank,
        optimizer,
        gradient_checkpointing,
        base_format,
        vllm,
    )
    predicted = planning.predict(shape, work, gpu_gib)
    suggested = planning.suggest(shape, work, gpu_gib)
    names = {
        "base": f"frozen base ({base_format})",
        "adapter": f"adapter, rank {lora_rank}, float32",
        "gradients": "its gradients",
        "optimizer": f"optimizer ({optimizer})",
        "activations": "activations of an update",
        "logits": "logits of an update",
        "scratch": "one weight dequantized",
        "generation": "transformers' KV cache (not at the same time)",
    }
    lines = [f"{shape.parameters / 1e9:.2f} G parameters"]
    lines += [f"  {names[key]:<48}{value / 2**30:9.2f} GiB" for key, value in predicted.parts.items() if value]
    lines.append(
        f"  {'peak of one process, with CUDA' + (' and vLLM' if vllm else ''):<48}{predicted.total / 2**30:9.2f} GiB"
    )
    if vllm:
        lines.append(
            f"  {'left for the KV cache':<48}{predicted.kv_left / 2**30:9.2f} GiB = {predicted.kv_sequences} sequences of {work.length} tokens"
        )
    lines.append(f"It {'fits' if predicted.fits else 'does NOT fit'} into {gpu_gib:g} GiB.")
    if suggested is None:
        lines.append("Not even one sequence a backward pass fits: shorten the completions, or use a larger GPU.")
    else:
        lines.append(
            f"Suggested: per_device_train_batch_size: {suggested[0].batch} ({suggested[1].total / 2**30:.1f} GiB)"
        )
    content = {
        **dataclasses.asdict(predicted),
        "fits": predicted.fits,
        "parameters": shape.parameters,
        "suggested_batch": suggested[0].batch if suggested else None,
    }
    _result(content, as_json, lines)
    if not predicted.fits and suggested is None:
        raise typer.Exit(1)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Versions, GPU, what will be used, and each problem with its remedy. Exit code 1 if something will not work."""
    from qerl_trl import doctor as diagnosis

    found = diagnosis.examine()
    _result(found.as_dict(), as_json, found.lines())
    if any(problem.fatal for problem in found.problems):
        raise typer.Exit(1)


@app.command()
def plot(
    run: Annotated[Path, typer.Argument(help="Output folder of a run, results.json, or trainer_state.json.")],
    output: Annotated[Path | None, typer.Option(help="PNG to write. Default: curves.png beside it.")] = None,
) -> None:
    """Draw the curves of a run: reward, entropy, noise, mismatch."""
    from qerl_trl import checkpoint
    from qerl_trl.plots import plot_curves

    file = run
    if run.is_dir():
        newest = checkpoint.last_checkpoint(run)
        candidates = [
            run / "results.json",
            run / "trainer_state.json",
            *([Path(newest) / "trainer_state.json"] if newest else []),
        ]
        file = next((path for path in candidates if path.is_file()), run)
    if not file.is_file():
        raise ValueError(f"{run} holds no results.json, no trainer_state.json and no whole checkpoint.")
    output = output or (run if run.is_dir() else run.parent) / "curves.png"
    temporary = output.with_name(f".{output.name}.tmp.png")
    plot_curves(
        json.loads(file.read_text())["log_history"], temporary, title=(run if run.is_dir() else run.parent).name
    )
    os.replace(temporary, output)
    print(output)


if __name__ == "__main__":
    main()
