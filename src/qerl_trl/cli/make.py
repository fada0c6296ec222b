"""Commands for publishing: quantize, merge, push."""

import copy
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from ..support.recipes import task_file
from . import train


def quantize(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a bf16 model.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write (compressed-tensors NVFP4).")],
    scale_rule: Annotated[str, typer.Option(help="rtn, four_over_six or neighbor_sweep.")] = "rtn",
    skip: Annotated[list[str] | None, typer.Option(help="Layers to leave dense: names, patterns. Repeatable.")] = None,
    device: train.Device = "cpu",
    workers: Annotated[int | None, typer.Option(help="Layers worked on at a time. Default: by the machine.")] = None,
    max_shard_gb: Annotated[float, typer.Option(help="Size of a shard, in GB.")] = 2.0,
    report_kl: Annotated[
        str | None, typer.Option(help="Text (.txt, .jsonl, task) to measure KL on. Loads both models in float32.")
    ] = None,
    report_rows: Annotated[int, typer.Option(min=1, help="Problems, or pieces of 128 tokens, of it.")] = 16,
    overwrite: train.Overwrite = False,
    trust_remote_code: train.TrustRemoteCode = False,
    as_json: train.AsJson = False,
) -> None:
    """Quantize a model to NVFP4, readable by transformers and vLLM. Killed? The same command continues."""
    from qerl_trl.publish import card as cards
    from qerl_trl.publish.quantize import REPORT_NAME, quantize_folder

    def card(folder: Path, export: Any) -> None:
        cards.write(folder, cards.facts_of_quantization(folder, export), export)

    how = device, workers, int(max_shard_gb * 1e9), overwrite, trust_remote_code
    with train.progress_bar("quantizing") as progress:
        done = quantize_folder(model, destination, scale_rule, skip, *how, card=card, progress=progress)
    content: dict[str, Any] = {"destination": str(destination), **done.figures(), "not_quantized": done.skipped}
    lines = [
        f"{done.weights:,} weights in {len(done.layers)} layers, {done.source_bytes / 1e9:.2f} GB -> "
        f"{done.written_bytes / 1e9:.2f} GB",
        f"relative squared error {done.nmse:.3g}, worst {content['worst_nmse']:.3g} in {content['worst_layer']} (all: "
        f"{REPORT_NAME})",
        f"left dense: {', '.join(done.skipped) or 'nothing'}",
        f"written: {destination}",
    ]
    if report_kl is not None:
        options = device, "float32", trust_remote_code
        content["measured"], measured = _damage(report_kl, report_rows, model, destination, options)
        lines += measured
    train.print_result(content, as_json, lines)


def prompt_batches(text: Path | str, tokenizer: Any, limit: int = 64, template: Any = None) -> list[Any]:
    """Return token ids (1, T) of the first problems of a .jsonl file or a task, with their answers if any, or of the
    first pieces of 128 tokens of a .txt file. The tokenizer gets the task's chat template."""
    from qerl_trl.tasks import data
    from qerl_trl.tasks.evaluation import prompt_texts
    from qerl_trl.tasks.task import Task

    file = Path(text)
    if file.suffix == ".txt":
        return [*tokenizer(file.read_text(), return_tensors="pt")["input_ids"].split(128, dim=1)][:limit]
    if isinstance(text, Path) or file.suffix == ".jsonl":
        rows = data.first(data.read(file, as_text=data.ANSWERS)["train"], limit)
        column = next((name for name in (*data.QUESTIONS, "text") if name in rows.column_names), None)
        problems = data.with_prompts(rows, prompt_column=column, needs_answer=False, named=text)
    else:
        task = Task.read(task_file(text))
        task.prepared(tokenizer)
        problems = data.first(task.splits()[1], limit)
    texts = ["".join(message["content"] for message in prompt) for prompt in problems["prompt"]]
    if tokenizer.chat_template:
        texts = prompt_texts(tokenizer, problems["prompt"], template or {})
    if "answer" in problems.column_names:
        texts = [
            f"{text}{'' if answer is None else answer}" for text, answer in zip(texts, problems["answer"], strict=True)
        ]
    return [tokenizer(each, return_tensors="pt", add_special_tokens=False)["input_ids"] for each in texts]


def _damage(text: str, rows: int, model: str, destination: Path, options: tuple) -> tuple[dict, list[str]]:
    """Measure the damage of a quantization and add it to its report; return it, also in lines."""
    from qerl_trl.publish import distance, load

    source, quantized = (load.load_any(str(each), *options) for each in (model, destination))
    measured = distance.damage(source.model, quantized.model, prompt_batches(text, source.tokenizer, rows))
    distance.add_to_report(destination, measured)
    before, after = measured["source"], measured["quantized"]
    worst = sorted(measured["output_errors"].items(), key=lambda item: -item[1])[:3]
    lines = [
        f"KL from the source {after['kl_nats_per_token']:.4f} nats per token on {after['tokens']:,.0f} tokens",
        *(f"{name} {before[name]:.3f} -> {after[name]:.3f}" for name in ("perplexity", "entropy")),
        f"largest output errors: {', '.join(f'{error:.3f} in {name}' for name, error in worst)}",
        "gain of --skip (vLLM fuses q, k, v and gate, up: skip these together):",
    ]
    for kind, row in measured["if_dense"].items():
        line = f"{kind:21} {100 * row['weight_share']:5.1f} % of weights, {100 * row['damage_share']:5.1f} % of KL"
        lines.append(f"{line}, {row['extra_bytes'] / 1e6:8.1f} MB more")
    return measured, lines


def merge(
    run: Annotated[Path, typer.Argument(help="Checkpoint, output folder of a run, or exported adapter.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write; of --as gguf a file.")],
    form: Annotated[
        Literal["bf16", "nvfp4", "gguf", "base", "adapter"],
        typer.Option("--as", help="The merge, dense or in 4 bits again; the NVFP4 base; the adapter as plain PEFT."),
    ] = "bf16",
    outtype: Annotated[Literal["bf16", "f16", "f32", "q8_0"], typer.Option(help="Weights of --as gguf.")] = "bf16",
    base_model: train.BaseModel = None,
    base_format: train.BaseFormat = None,
    allow_other_base: train.AllowOtherBase = False,
    onto_original: Annotated[
        bool, typer.Option("--onto-original", help="Merge onto the unquantized base: another model. Needs --prompts.")
    ] = False,
    prompts: Annotated[
        Path | None, typer.Option(help="Problems (.jsonl) to measure the distance from the trained policy.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="YAML file or shipped name: its held-out problems as prompts.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="An NVFP4 merge even if nothing of the adapter is left.")
    ] = False,
    dataset: train.DatasetName = None,
    dtype: train.WrittenDtype = None,
    device: train.Device = "cpu",
    trust_remote_code: train.TrustRemoteCode = False,
    overwrite: train.Overwrite = False,
    as_json: train.AsJson = False,
) -> None:
    """Turn a run into something to publish: merged model, adapter or base, with a card."""
    from peft import PeftModel

    from qerl_trl.checkpoint.records import Export, Measured

    if onto_original and (form != "bf16" or (prompts is None and task is None)):
        raise ValueError(
            "--onto-original makes a model that was not trained, so it needs --as bf16 and a measurement: add "
            "--prompts FILE.jsonl or --task."
        )
    measures = form in ("bf16", "gguf", "nvfp4") and (prompts is not None or task is not None)
    from qerl_trl.publish import card as cards
    from qerl_trl.publish import distance, export, gguf, write
    from qerl_trl.publish.load import load_any, load_policy, recorded_template_kwargs

    write.require_apart(run, destination)
    if base_model is not None:
        write.require_apart(base_model, destination)
    write.require_room(destination, overwrite)
    made, stack = destination, ExitStack()
    if form == "gguf":
        form, destination = "bf16", stack.enter_context(gguf.converted(made, outtype))
    policy = load_policy(run, base_model, base_format, None, device, allow_other_base, trust_remote_code)
    measured: Measured | None = None
    if measures:
        assert policy.tokenizer is not None  # set by load_policy
        tokenizer = copy.copy(policy.tokenizer)  # the policy's own tokenizer is written with the run's template
        batches = prompt_batches(task or cast(Path, prompts), tokenizer, 64, recorded_template_kwargs(policy.settings))
        trained = distance.logits_of(policy.model, batches)
        with policy.model.disable_adapter() if isinstance(policy.model, PeftModel) else nullcontext():
            base_kl = distance.logit_distance(trained, distance.logits_of(policy.model, batches))["kl_nats_per_token"]
        if onto_original and policy.settings["merged_onto"] == "nvfp4":  # else the same as a plain merge
            settings = policy.settings
            del policy
            policy = load_policy(run, base_model, "bf16", None, device, allow_other_base, trust_remote_code)
            policy.settings["base_format"] = settings.get("base_format", "nvfp4")
            measured = distance.logit_distance(trained, distance.logits_of(policy.model, batches))
    facts = cards.facts_of_run(run, policy.settings, dataset)

    def card(folder: Path, record: Export) -> None:
        cards.write(folder, facts, record)

    with train.progress_bar("writing") as progress:
        if form == "adapter":
            done = export.save_adapter(policy, destination, base_model=base_model, overwrite=overwrite, card=card)
        elif form == "base":
            done = export.save_base(policy, destination, overwrite=overwrite, card=card, progress=progress)
        elif form == "nvfp4":
            rule = policy.settings.get("scale_rule", "rtn")
            done = export.save_merged_nvfp4(
                policy, destination, None, rule, force, overwrite, card=card, progress=progress, notify=train.note
            )
        else:
            weights = dtype or "bfloat16"
            done = export.save_merged(
                policy, destination, None, weights, overwrite, measured=measured, card=card, progress=progress
            )
    content: dict[str, Any] = {name: value for name, value in done.items() if name in ("kind", "survived")}
    content["destination"] = str(made)
    lines = [f"written: {made} ({done['kind'].replace('_', ' ')})"]
    if form == "bf16" and (survived := done.get("survived")):
        lines.append(
            f"rounding to {done['dtype']} kept {survived['kept_fraction']:.3f} of the adapter's change of the weights "
            f"(error {survived['error_ratio']:.2f} of its size)"
        )
    if measures:
        written = load_any(str(destination), device, policy.settings["dtype"])  # same arithmetic as the policy
        measured = measured or distance.logit_distance(trained, distance.logits_of(written.model, batches))
        content["measured"], content["base_kl_nats_per_token"] = measured, base_kl
        lines.append(
            f"distance to the trained policy on {measured['tokens']} tokens: mean logit "
            f"{measured['mean_logit_distance']:.3g}, KL {measured['kl_nats_per_token']:.3g} nats per token (of the "
            f"base without the adapter {base_kl:.3g}), same greedy token {100 * measured['same_greedy_token']:.1f} %"
        )
    stack.close()  # converts
    train.print_result(content, as_json, lines)


def push(
    what: Annotated[
        Literal["adapter", "merged", "base", "model"],
        typer.Argument(help="Content of the folder; model: from base_format full."),
    ],
    folder: Annotated[Path, typer.Argument(help="Folder of merge or quantize, or of a run (adapter, model).")],
    repo_id: Annotated[str, typer.Argument(help="user/name on the Hub.")],
    public: Annotated[bool, typer.Option("--public", help="Visible to everybody. Default: private.")] = False,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the base, where the run had a folder.")] = None,
    allow_other_base: train.AllowOtherBase = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Publish into a repository with other content.")] = False,
    dataset: train.DatasetName = None,
    as_json: train.AsJson = False,
) -> None:
    """Publish to the Hugging Face Hub in one commit: announced first, private by default. Interrupted? Run it again."""
    from qerl_trl.checkpoint import seal
    from qerl_trl.checkpoint.records import FORMS, MERGED_KINDS, Facts
    from qerl_trl.publish import card as cards
    from qerl_trl.publish import hub
    from qerl_trl.publish.load import recorded_settings, require_adapter

    kinds: dict[str, tuple[str, ...]] = {**FORMS, "merged": MERGED_KINDS, "model": ()}
    kind = seal.recorded_run(folder).get("kind")
    options: dict[str, Any] = {"private": not public, "revision": revision, "force": force, "notify": train.note}
    if what != "model":
        options |= {"base_model": base_model, "allow_other_base": allow_other_base}
    if kind is None and what in ("adapter", "model"):
        if what == "adapter":
            require_adapter(folder)
        facts = cards.facts_of_run(folder, recorded_settings(folder), dataset)
        url = hub.push_run(folder, repo_id, facts, what == "adapter", **options)
    elif kind in kinds[what]:
        said: Facts | None = {"dataset": dataset} if dataset else None
        url = hub.push_folder(folder, repo_id, facts=said, **options)
    else:
        found = f"a {kind.replace('_', ' ')}" if kind else "no export of qerl-trl"
        raise ValueError(
            f"{folder} contains {found}, not something to push as {what}. Make one with qerl-trl merge or qerl-trl "
            "quantize."
        )
    train.print_result({"url": url, "repo_id": repo_id, "private": not public}, as_json, [url])
