"""What each `base_format` can do in vLLM. Whatever cannot work is refused here, before anything is loaded.

| base_format | colocate mode | server mode |
|---|---|---|
| `nvfp4`, `bf16` | the engine reads the trainer's weights and gets the adapter | the server loads the checkpoint and gets the adapter |
| `nf4` | the same; one engine per process, since 4-bit blocks of bitsandbytes cannot be split | no |
| `full` | the engine has a copy of the weights in the compute dtype; each step streams them in place | no |

Noise on the norms works in all of them.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedType

from ..checkpoint import seal
from ..config import QeRLConfig, QeRLRLOOConfig
from ..memory.optimizers import optimizer_under_fsdp
from ..support.distributed import fsdp_version
from .engine import RolloutError
from .vllm.plugin import check_vllm_is_there, check_vllm_version, import_vllm

logger = logging.getLogger(__name__)
_SERVER = {
    "full": "every weight changes at each step, and the server takes adapters and norms only",
    "nf4": "the server's vLLM reads the checkpoint itself and has no bitsandbytes weights",
}
#: of `generation_kwargs`, what TRL has an argument for, by which lengths are planned and completions are scored
_OWN = {
    "temperature": "temperature", "max_new_tokens": "max_completion_length", "max_tokens": "max_completion_length",
    "num_return_sequences": "num_generations", "n": "num_generations",
}  # fmt: skip
#: of the rest, what does not sample from the softmax of the logits, and the value with which it does
_OTHER_POLICY = {"do_sample": True, "num_beams": 1, "guidance_scale": 1, "penalty_alpha": 0}


def check_run(args: QeRLConfig | QeRLRLOOConfig, given: Mapping[str, Any]) -> None:
    """All of the checks here, before anything is loaded. `given`: the trainer's arguments, by name."""
    check_options(args)
    check_environment(args)
    check_given(args, given)


def check_generation(args: QeRLConfig | QeRLRLOOConfig) -> None:
    """Warn of `generation_kwargs`, which TRL puts over its own arguments, that sample from another policy than the one completions are scored with."""
    assert not isinstance(args.generation_kwargs, str), "TRL's configs parse JSON when they are built"
    for name, value in (args.generation_kwargs or {}).items():
        own = _OWN.get(name)
        if own is not None:
            said = 1 if own == "num_generations" else getattr(args, own)
            if value not in (None, said) and not (own == "max_completion_length" and value < said):
                said = "generation_kwargs={%r: %r} overrides %s=%r, by which completions are planned and scored. Set %s instead."
                logger.warning(said, name, value, own, getattr(args, own), own)
        elif name in _OTHER_POLICY and value not in (None, _OTHER_POLICY[name]):
            said = "generation_kwargs={%r: %r} draws completions from another policy than the one they are scored with. Leave it out."
            logger.warning(said, name, value)


def _refuse(*wrong: tuple[Any, str]) -> None:
    """Raise the first text whose condition holds."""
    for condition, text in wrong:
        if condition:
            raise ValueError(text)


def check_options(args: QeRLConfig | QeRLRLOOConfig) -> None:
    """Refuse combinations of options that no engine can run."""
    check_generation(args)
    held, ranks = f"base_format={args.base_format!r}", args.vllm_tensor_parallel_size
    batch_invariant = args.vllm_batch_invariant and not (args.use_vllm and args.base_format == "nvfp4")
    _refuse((
        batch_invariant,
        f"vllm_batch_invariant=True with use_vllm={args.use_vllm} and {held} cannot work: only NVFP4 in vLLM has such kernels. Pass "
        "use_vllm=True and base_format='nvfp4', or leave it out.",
    ))  # fmt: skip
    if not args.use_vllm:
        return
    server = args.vllm_mode == "server" and _SERVER.get(args.base_format)
    check_engine(args)
    _refuse(
        (
            server,
            f"{held} with vllm_mode='server' cannot work: {server}. Use vllm_mode='colocate', or base_format='nvfp4' or 'bf16'.",
        ),
        (
            args.base_format == "nf4" and ranks > 1,
            f"{held} with vllm_tensor_parallel_size={ranks} cannot work: bitsandbytes weights cannot be split. Use "
            "vllm_tensor_parallel_size=1 or base_format='nvfp4'.",
        ),
    )


#: of `vllm_engine_kwargs`, what this package tells an engine itself, and what to set instead
_OURS = {
    "model": "model", "revision": "model_init_kwargs", "tensor_parallel_size": "vllm_tensor_parallel_size", "pipeline_parallel_size": None,
    "data_parallel_size": None, "distributed_executor_backend": None, "load_format": None, "quantization": "base_format", "additional_config": None,
    "logprobs_mode": None, "enable_sleep_mode": "vllm_enable_sleep_mode",
}  # fmt: skip
#: methods of speculation that have no weights
_WITHOUT_WEIGHTS = ("ngram", "[ngram]", "ngram_gpu", "suffix")


def check_engine(args: QeRLConfig | QeRLRLOOConfig) -> None:
    """Refuse arguments of a colocated engine with which it would not be this trainer's."""
    chosen = args.vllm_engine_kwargs
    if args.vllm_mode != "colocate" or not isinstance(chosen, dict):
        return
    for name in _OURS.keys() & chosen.keys():
        instead = f"set {_OURS[name]}" if _OURS[name] else "leave it out"
        raise ValueError(f"vllm_engine_kwargs has {name}={chosen[name]!r}, which the trainer sets itself: {instead}.")
    speculation, offload = chosen.get("speculative_config"), chosen.get("cpu_offload_gb")
    draft = speculation and (speculation.get("method") or speculation.get("model"))
    _refuse(
        (
            speculation and draft not in _WITHOUT_WEIGHTS,
            f"vllm_engine_kwargs has speculative_config={speculation!r}, and vLLM would load the trainer's weights into the draft. Leave it "
            f"out, or use a method without weights ({', '.join(_WITHOUT_WEIGHTS)}).",
        ),
        (
            offload and args.share_weights and args.base_format != "full",
            f"vllm_engine_kwargs has cpu_offload_gb={offload!r}, but the engine reads the trainer's weights, which stay on the GPU. Leave it "
            "out, or pass share_weights=False.",
        ),
    )


#: what a trainer may be given that takes as many turns with the engine as it likes
_TURNS = ("rollout_func", "tools", "environment_factory")
#: of those, what goes on in TRL's own loop, with the rows of a process that are not done
_LOOPS = ("tools", "environment_factory")


def check_given(args: QeRLConfig | QeRLRLOOConfig, given: Mapping[str, Any]) -> None:
    """Refuse what the processes of a run cannot do with what a trainer was `given`."""
    sharded = "FSDP" if fsdp_version(args) is not None else "DeepSpeed ZeRO-3" if _zero_stage(args) == 3 else None
    several = args.world_size > 1 and args.use_vllm and asked_together(args)
    for name in (name for name in _TURNS if given.get(name)):
        _refuse(
            (
                not args.use_vllm and sharded,
                f"{name} with use_vllm=False cannot work under {sharded}: each forward is collective, and processes take different numbers of "
                "turns. Use use_vllm=True with vllm_mode='colocate', or plain data parallelism.",
            ),
            (
                several and name in _LOOPS,
                f"{name} with {several} cannot work in {args.world_size} processes: each has its own number of turns, and TRL would deal "
                "completions to other prompts. Use vllm_mode='colocate' with vllm_tensor_parallel_size=1.",
            ),
        )


def asked_together(args: QeRLConfig | QeRLRLOOConfig) -> str | None:
    """The option by which one engine answers several processes in one call."""
    if args.vllm_mode == "server":
        return "vllm_mode='server'"
    size = args.vllm_tensor_parallel_size
    return f"vllm_tensor_parallel_size={size}" if size > 1 else None


def _zero_stage(args: QeRLConfig | QeRLRLOOConfig) -> int:
    return getattr(args.deepspeed_plugin, "zero_stage", 0)


def check_environment(args: QeRLConfig | QeRLRLOOConfig) -> None:
    """Refuse a process in which the engine could not start, and replace an optimizer that could not step: called before the model is loaded."""
    zero_stage = _zero_stage(args)
    _refuse((
        zero_stage == 3 and args.base_format in ("nvfp4", "nf4"),
        f"base_format={args.base_format!r} does not train under DeepSpeed ZeRO-3, which partitions weights while they load, before they are "
        "quantized. Use FSDP 2 (fsdp_version: 2), ZeRO-2 or plain data parallelism.",
    ))  # fmt: skip
    settle_optimizer(args)
    if not args.use_vllm:
        return
    check_sharding(zero_stage, fsdp_version(args))
    check_vllm_is_there()  # TRL's client of a server needs it too
    if args.vllm_mode == "colocate":
        check_vllm_version()
        import_vllm()  # TRL has imported it already


def check_sharding(zero_stage: int, fsdp_version: int | None) -> None:
    """Refuse ways of sharding the trainer from which an engine cannot get whole tensors, layer by layer."""
    _refuse(
        (
            zero_stage == 3,
            "vLLM rollouts do not work with DeepSpeed ZeRO-3, which partitions weights while they load. Use ZeRO-2, FSDP 2 (fsdp_version: 2) or "
            "plain data parallelism.",
        ),
        (
            fsdp_version == 1,
            "vLLM rollouts do not work with FSDP version 1, which flattens a layer's weights into one parameter. Set fsdp_version: 2 in the "
            "accelerate configuration.",
        ),
    )


def checked_rollout_func(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """`function`, with a check of what it returns: a completion per prompt, and one log-probability per token.

    TRL broadcasts vLLM's lists of candidates into a third dimension, and the correction becomes one number of all pairs of tokens.
    """

    @functools.wraps(function)
    def checked(prompts: list, trainer: Any) -> dict[str, Any]:
        output = function(prompts, trainer)
        if not isinstance(output, dict) or "completion_ids" not in output:  # TRL names missing keys
            return output
        tokens, logps = output["completion_ids"], output.get("logprobs")
        if len(tokens) != len(prompts) or (logps is not None and len(logps) != len(prompts)):
            came = f"{len(tokens)} completions" + ("" if logps is None else f" and log-probabilities of {len(logps)}")
            raise RolloutError(
                f"rollout_func returned {came} for {len(prompts)} prompts. Return one completion per prompt."
            )
        for number, ids in enumerate(tokens):
            shape = (len(ids),) if logps is None else tuple(np.shape(logps[number]))
            if len(ids) == 0 or shape != (len(ids),):
                raise RolloutError(
                    f"Completion {number} of {len(tokens)} from rollout_func has {len(ids)} tokens and log-probabilities of shape {shape}. Return at "
                    "least one token, and one number per token: of vLLM's lists the first, value[0]."
                )
        return output

    return checked


def placed_in_training(accelerator: Accelerator) -> bool:
    """Whether the model gets to its device only with `accelerator.prepare`, which transformers calls when training starts."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def settle_optimizer(args: Any) -> None:
    """Under FSDP, an optimizer that can step what it shares out ([`optimizer_under_fsdp`]) in place of one that would stop at the first step."""
    if fsdp_version(args) is None:
        return
    wanted = str(getattr(args.optim, "value", args.optim))
    used = optimizer_under_fsdp(wanted)
    if used != wanted:
        logger.warning(
            "optim=%r is bitsandbytes', which cannot step parameters that FSDP shards. This run uses %r: the same AdamW, with a sharded state in float32.",
            wanted,
            used,
        )
        args.optim = type(args.optim)(used)
    if used == "sgd" and seal.can_go_on(args):
        logger.warning(
            "optim='sgd' under FSDP cannot resume from its checkpoints: torch does not load an optimizer without a state. Use optim='adamw_torch_fused'."
        )
