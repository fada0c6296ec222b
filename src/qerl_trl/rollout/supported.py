"""What the processes of a run can do, and each `base_format` in vLLM. What cannot work is refused before anything is loaded: combinations of
options when a configuration is made (`support/options.py`), the rest here.

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
from ..memory.workload import optimizer_under_fsdp
from ..support.distributed import fsdp_version
from .engine import RolloutError
from .vllm.plugin import check_vllm_is_there, check_vllm_version, import_vllm

logger = logging.getLogger(__name__)


def _refuse(*wrong: tuple[Any, str]) -> None:
    """Raise the first text whose condition holds."""
    for condition, text in wrong:
        if condition:
            raise ValueError(text)


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
