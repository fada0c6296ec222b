"""Commands that plan a run: `plan`, its memory from shapes alone; `tune`, the kernels measured on this GPU."""

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..support.recipes import config_file, examples_folder
from .train import AsJson, TrustRemoteCode, note, print_result

if TYPE_CHECKING:
    from ..memory.formulas import Shape
    from ..memory.workload import Workload

#: options of `plan` -> their names in a recipe
_OF_A_FILE = {
    "batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "completion_length": "max_completion_length",
    "completions": "generation_batch_size",
    "lora_rank": "lora_r",
    "optimizer": "optim",
    "base_format": "base_format",
    "gradient_checkpointing": "gradient_checkpointing",
    "vllm": "use_vllm",
    "sleep": "vllm_enable_sleep_mode",
}


#: options of `plan` that do not change the recipe's workload
_OUTSIDE_THE_WORKLOAD = {"config", "card", "gpu_gib", "as_json"}


def _count(help: str, **more: Any) -> Any:
    return typer.Option(min=1, help=help, **more)


def plan(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Folder or Hub id. Default: what --config names.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file or shipped name; options here come first.")] = None,
    gpu_gib: Annotated[float | None, typer.Option(help="Memory of one GPU, in GiB.", min=1, show_default="80")] = None,
    card: Annotated[str | None, typer.Option(help="A GPU by name, such as H100; cpu: this machine's CPU.")] = None,
    gpus: Annotated[int, _count("GPUs that share each rollout and update (data parallel); one is planned.")] = 1,
    fsdp: Annotated[bool, typer.Option(help="The GPUs share the base (FSDP 2), but not with an engine.")] = False,
    zero2: Annotated[bool, typer.Option(help="The GPUs share the optimizer (DeepSpeed ZeRO-2).")] = False,
    tensor_parallel: Annotated[int | None, _count("GPUs of one engine.", show_default="1, or --config's")] = None,
    prompt_length: Annotated[int, _count("Tokens of the longest prompt, with its chat template.")] = 512,
    batch: Annotated[int, _count("Sequences of one backward pass.")] = 8,
    accumulation: Annotated[int, _count("Backward passes of one update.")] = 1,
    completion_length: Annotated[int, _count("Tokens of the longest completion.")] = 4096,
    completions: Annotated[int, _count("Sequences generated at a time.")] = 128,
    lora_rank: Annotated[int, _count("Rank of the adapter.")] = 32,
    optimizer: Annotated[str, typer.Option(help="As in the `optim` of a configuration.")] = "adamw_torch_fused",
    base_format: Annotated[
        Literal["nvfp4", "bf16", "nf4", "full"], typer.Option(help="The base's format; full: every weight is trained.")
    ] = "nvfp4",
    gradient_checkpointing: Annotated[
        bool | None, typer.Option(help="Recompute activations.", show_default="in as many layers as memory demands")
    ] = None,
    vllm: Annotated[bool, typer.Option(help="Roll out in vLLM, in the same process (else transformers).")] = True,
    sleep: Annotated[bool, typer.Option(help="vLLM gives its KV cache back during updates.")] = False,
    as_json: AsJson = False,
) -> None:
    """Plan the memory of a run from shapes alone: what fits, how many sequences at a time. Exit code 1: no fit."""
    import dataclasses

    from qerl_trl.memory.plan import Gpu, gpu_of_card, plan_run

    if (fsdp and zero2) or ((fsdp or zero2) and gpus == 1):
        raise ValueError("--fsdp and --zero2 are two ways to share between GPUs: give one, and how many with --gpus.")
    one_gpu = Gpu.of_gib(gpu_gib or 80.0) if card in (None, "cpu") else gpu_of_card(card)
    said = {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    shipped = None if (config is None) == (model is None) else _shipped(config, model)
    if config is not None and shipped is not None and said <= _OUTSIDE_THE_WORKLOAD:
        work = shipped[1]
    else:
        named, work = _workload(context.params, said)
        model = model or named
    if model is None and shipped is None:
        raise ValueError("There is nothing to plan: name a model, or a configuration with --config.")
    shape = _shape_of(str(model), work) if shipped is None else shipped[0]
    work = work.on_a_cpu() if card == "cpu" else work
    if work.cpu and card in (None, "cpu"):
        one_gpu = Gpu.of_machine(gpu_gib)
    made = plan_run(shape, work, one_gpu)
    content = dataclasses.asdict(made) | {"parameters": shape.parameters}
    content |= {name: getattr(made, name) for name in ("update", "rollout", "peak", "waves", "fits")}
    lines = [_shared(work, gpus, fsdp)] if gpus > 1 else []
    lines.append(f"{shape.parameters / 1e9:.2f} G parameters{f', on one {card}' if card else ''}")
    print_result(content, as_json, [*lines, made.table(), made.verdict()])
    if not made.fits:
        raise typer.Exit(1)


def _shipped(config: str | None, model: str | None) -> tuple["Shape", "Workload"] | None:
    """Return the stored shape and workload of an unchanged shipped recipe, or of the one for `model`: they need neither
    torch nor the Hub."""
    from qerl_trl.memory.delta_nets import DeltaNets
    from qerl_trl.memory.formulas import Shape
    from qerl_trl.memory.workload import Workload

    every = json.loads((examples_folder() / "configs/shapes.json").read_text())
    if config is not None:
        file = config_file(config)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        every = {file.stem: every[file.stem]} if every.get(file.stem, {}).get("sha256") == digest else {}
    found = next((row for row in every.values() if model is None or row["model"] == model), None)
    if found is None:
        return None
    given = found["shape"]
    given["linears"] = tuple((n, k) for n, k, layers in given["linears"] for _ in range(layers))
    given["delta_nets"] = DeltaNets(**given["delta_nets"]) if given["delta_nets"] else None
    return Shape(**given), Workload(**found["work"])


def _shape_of(model: str, work: "Workload") -> "Shape":
    """Return the model's shape; raises `ValueError` for a base that cannot be trained."""
    from qerl_trl.memory.formulas import shape_of
    from qerl_trl.nvfp4.config import load_config

    shape = shape_of(model)
    if work.base_format == "nvfp4":
        load_config(model)
    if shape.experts and work.rollout != "transformers":
        raise ValueError(
            f"{model} is a mixture of experts, which vLLM cannot roll out here. Set use_vllm=False (plan: --no-vllm)."
        )
    if shape.experts and work.base_format == "nvfp4":
        note(
            "The experts of this model are not quantized yet, and a run refuses it unless its recipe leaves them dense "
            "(modules_to_not_convert: [experts]). This plan assumes so."
        )
    return shape


def _shared(work: "Workload", gpus: int, fsdp: bool) -> str:
    passes = "pass" if work.accumulation == 1 else "passes"
    return (
        f"{gpus} GPUs, {'which share the base' if fsdp else 'the whole base on each'}: "
        f"{work.completions // work.tensor_parallel} completions of a rollout and {work.accumulation} backward "
        f"{passes} of {work.batch} per update on each; the plan is for one GPU"
    )


def _workload(options: Mapping[str, Any], said: set[str]) -> tuple[str | None, "Workload"]:
    """Return (recipe's model or None, workload): of the recipe with the options in `said`, or of all options."""
    from qerl_trl.memory.workload import Workload, dtype_bytes_of, on_a_gpu, workload_of_file

    named, gpus, prompt_length, base_format = None, options["gpus"], options["prompt_length"], options["base_format"]
    if options["config"] is not None:
        from qerl_trl.tasks.script import check_recipe

        file = config_file(options["config"])
        check_recipe(file)
        instead = {option: options[name] for name, option in _OF_A_FILE.items() if name in said}
        named, work = workload_of_file(file, prompt_length, gpus, instead)
    else:
        same = ("batch", "completion_length", "lora_rank", "optimizer", "gradient_checkpointing", "sleep")
        work = Workload(
            **{name: options[name] for name in same},
            prompt_length=prompt_length,
            completions=-(-options["completions"] // gpus),
            accumulation=-(-options["accumulation"] // gpus),
            base_format=base_format,
            dtype_bytes=dtype_bytes_of(None, base_format),
            processes=gpus,
            rollout="colocate" if options["vllm"] else "transformers",
            **on_a_gpu(base_format),
        )
    if options["tensor_parallel"] is not None:
        work = work.with_engines_of(options["tensor_parallel"])
    work = work.under_fsdp() if options["fsdp"] else work
    return named, work.under_zero2() if options["zero2"] else work


def tune(
    model: Annotated[str, typer.Argument(help="Folder or Hub id, bf16 or NVFP4; only its configuration is read.")],
    tokens: Annotated[
        str, typer.Option(help="Numbers of tokens, multiples of 8: a range such as 8-512, or a list such as 64,128.")
    ] = "8-512",
    rank: Annotated[int, typer.Option(min=0, help="Rank of the adapter; 0: none.")] = 32,
    seconds: Annotated[float, _count("Stop after this time; unmeasured shapes keep the shipped kernels.")] = 90.0,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Measure the fastest kernels for a model on this GPU, and store the result. QERL_NVFP4_TUNED=0 ignores it."""
    sizes = numbers_of_tokens(tokens)
    import torch

    from qerl_trl.model.loading import matrices_of_checkpoint
    from qerl_trl.nvfp4.linear import describe, kernels_for

    matrices = matrices_of_checkpoint(model, trust_remote_code=trust_remote_code)
    device = torch.device("cuda")
    if not torch.cuda.is_available() or kernels_for(device) is None:
        why = describe(device) if torch.cuda.is_available() else "there is no CUDA device"
        raise RuntimeError(f"tune measures the GPU that a run will use, but here {why}. Run it on that machine.")
    from qerl_nvfp4 import measured, refine, select
    from qerl_nvfp4.precompile import Weight

    if not measured.allowed():
        note("QERL_NVFP4_TUNED=0 is set: the measurements are stored, but not used until you unset it.")
    begin = time.monotonic()
    weights = [Weight(sum(m.rows), m.columns, m.rows, rank) for m in matrices]
    with contextlib.redirect_stdout(sys.stderr):  # failing candidates print messages
        found = refine.refine(weights, sizes, seconds, note)
    path = measured.path_of(*select.device_properties(None)[:2])
    took = time.monotonic() - begin
    names: dict[tuple[int, int], str] = {}
    for m in matrices:
        place = sum(m.rows), m.columns
        names[place] = f"{names[place]}, {m.name}" if place in names else m.name
    content: dict[str, Any] = {
        "cache": str(path),
        "device": torch.cuda.get_device_name(device),
        "rank": measured.padded(rank),
        "seconds": round(took, 1),
        "matrices": [{"name": names[one.N, one.K], **one._asdict()} for one in found],
    }
    lines = [f"{names[one.N, one.K]} {one.text()}" for one in found]
    print_result(content, as_json, [*lines, f"kept after {took:.0f} s: {path}"])


def numbers_of_tokens(text: str) -> list[int]:
    """Parse token counts: "8-512" (every multiple of 8) or "64,128"."""
    try:
        first, dash, last = text.partition("-")
        found = list(range(int(first), int(last) + 1, 8)) if dash else [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or any(number <= 0 or number % 8 for number in found):
        raise ValueError(f"--tokens {text}: give multiples of 8, a range such as 8-512, or a list such as 64,128.")
    return found
