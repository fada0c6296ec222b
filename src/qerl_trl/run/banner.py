"""The banner at a run's start: versions, device, bytes, kernels, noise, settings."""

import dataclasses
from typing import Any

import torch
from torch import nn

from ..checkpoint.records import hardware, versions
from ..memory.formulas import model_bytes, optimizer_bytes
from ..nvfp4.fused import selected_for_model
from ..nvfp4.linear import NVFP4Linear, describe
from ..rollout import mismatch
from ..rollout.probe import first_prompts
from ..rollout.sampling import of_the_model_alone
from ..rollout.supported import placed_in_training


def peak_memory_gib(device: torch.device) -> float:
    """Return this process's peak memory in GiB: GPU memory allocated through torch, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # from KiB


def base_description(model: nn.Module, base_format: str) -> str:
    """Describe the format of the base weights."""
    packed = [module for module in model.modules() if isinstance(module, NVFP4Linear)]
    if packed:
        dtype = str(packed[0].compute_dtype).removeprefix("torch.")
        fp8 = " (products in FP8: w4a8)" if packed[0].compute == "w4a8" else ""
        return (
            f"NVFP4 in {len(packed)} linear layers{fp8}, {dtype} elsewhere; {describe(packed[0].weight_packed.device)}"
        )
    named = {"bf16": "bf16, frozen", "nf4": "bitsandbytes NF4, frozen", "full": "all weights trained"}
    return named.get(base_format, base_format)


def banner(trainer) -> str:
    """Return the lines printed at a run's start."""
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    sizes, plan = model_bytes(model), trainer.memory_plan
    rollout = "transformers generate"
    if args.use_vllm:
        shared = args.share_weights and args.vllm_mode == "colocate"
        rollout = (
            f"vLLM, {args.vllm_mode}" + ", weights shared" * shared + ", batch-invariant" * args.vllm_batch_invariant
        )
    rows = {
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "device": hardware(args),
        "base": f"{base_description(model, args.base_format)}, {_size(sizes.base)}",
        "trained": f"{sizes.trained_parameters:,} parameters, {_size(sizes.trained)}",
        "optimizer": f"{plan.work.optimizer}, {_size(optimizer_bytes(plan.work.optimizer, sizes))}, "
        f"lr {args.learning_rate:g}",
        "noise": str(trainer.aqn or "off"),
        "rollout": f"{rollout}; {args.generation_batch_size} completions of up to {args.max_completion_length} tokens, "
        f"{args.num_generations} per prompt",
        "memory": plan.summary(),
        "unlike TRL": "; ".join(unlike_trl(args)) or "nothing but the checks",
    }
    elsewhere = args.use_vllm and args.vllm_mode == "server"
    if kernels := [] if elsewhere else selected_for_model(model, plan.work.lora_rank, args.vllm_batch_invariant):
        rows["kernels"] = "\n".join(kernels)
    width = max(map(len, rows))
    below = f"\n{'':<{width + 4}}"
    return "\n".join(f"  {name:<{width}}  {text.replace(chr(10), below)}" for name, text in rows.items())


def unlike_trl(args: Any) -> list[str]:
    """List differences of a run with `args` from TRL's config, and how to undo them: a summary of
    docs/source/index.md. Settings chosen by the user are listed only if equal to our default."""
    found = []
    if args.base_format != "full":
        found.append(f'the base is frozen in {args.base_format} and an adapter is trained (undo: base_format="full")')
    if args.aqn:
        found.append("noise while sampling (undo: aqn=False)")
    theirs = next(cls for cls in type(args).__mro__ if cls.__module__.startswith("trl."))
    before = {field.name: field.default for field in dataclasses.fields(theirs)}
    for field in dataclasses.fields(args):
        ours = field.default
        if field.name not in before or ours == before[field.name] or getattr(args, field.name) != ours:
            continue
        corrected = args.use_vllm or (args.aqn and field.name == "vllm_importance_sampling_mode")
        if corrected or not field.name.startswith("vllm_"):
            found.append(f"{field.name} {ours} (TRL: {before[field.name]})")
    if args.push_to_hub and args.hub_private_repo:
        found.append("what is pushed is private (undo: hub_private_repo=False)")
    return found


def announce(trainer: Any) -> None:
    """Measure the noise, print the banner on the main process, once per trainer, and warn of uncorrected noise."""
    if not trainer._announced:
        trainer._announced = True
        noisy = trainer.aqn is not None and trainer.aqn.schedule.ever_noisy
        prompts = first_prompts(trainer, trainer.processing_class, 8 * noisy)
        if prompts and not placed_in_training(trainer.accelerator):
            with of_the_model_alone(trainer.model):
                trainer.aqn.measure(trainer.model, prompts, trainer.temperature)
        trainer.accelerator.print(banner(trainer))
        if trainer.accelerator.is_main_process:
            mismatch.warn_of_uncorrected_noise(trainer, trainer.aqn)


def _size(count: float) -> str:
    if count < 1024:
        return f"{count:.0f} B"
    power = min(3, (int(count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {['', 'KiB', 'MiB', 'GiB'][power]}"
