"""Commands that only look: plan, doctor, plot."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import AsJson, print_result


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
    print_result(content, as_json, lines)
    if not predicted.fits and suggested is None:
        raise typer.Exit(1)


def doctor(as_json: AsJson = False) -> None:
    """Versions, GPU, what will be used, and each problem with its remedy. Exit code 1 if something will not work."""
    from qerl_trl import doctor as diagnosis

    found = diagnosis.examine()
    print_result(found.as_dict(), as_json, found.lines())
    if any(problem.fatal for problem in found.problems):
        raise typer.Exit(1)


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
