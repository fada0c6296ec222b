"""Supported combinations of processes, sharding and `base_format` in vLLM. Others are refused before anything is
loaded: combinations of options by the configuration (`support/options.py`), the rest here.

| base_format | colocate mode | server mode |
|---|---|---|
| `nvfp4`, `bf16` | engine reads the trainer's weights; syncs the adapter | loads the checkpoint; syncs the adapter |
| `nf4` | the same; one engine per process, since 4-bit blocks of bitsandbytes cannot be split | no |
| `full` | engine has a copy of the weights in the compute dtype; each step streams them in place | no |

Noise on the norms works in all of them.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers.training_args import OptimizerNames

from ..config import QeRLConfig, QeRLRLOOConfig
from ..memory.workload import optimizer_under_fsdp
from ..support.distributed import fsdp_version
from .engine import RolloutError
from .vllm.plugin import OLDEST_VLLM, check_vllm, import_vllm

logger = logging.getLogger(__name__)


#: trainer arguments that make any number of engine calls per process; those that run in TRL's own loop
_TURNS, _LOOPS = ("rollout_func", "tools", "environment_factory"), ("tools", "environment_factory")


def check_given(args: QeRLConfig | QeRLRLOOConfig, given: Mapping[str, Any]) -> None:
    """Refuse (`ValueError`) multi-turn rollouts with collective model calls: the number of turns differs per process.
    Sharded models would hang, and TRL would mix up one engine's completions. Score centering knows neither."""
    turns = list(filter(given.get, _TURNS))
    sharded = "FSDP" if fsdp_version(args) is not None else "DeepSpeed ZeRO-3" if _zero_stage(args) == 3 else None
    together: str | None = None
    why = "the number of turns differs per process. Use use_vllm=True with vllm_mode='colocate' and "
    why += "vllm_tensor_parallel_size=1, or plain data parallelism"
    if vars(args).get("score_centering_top_k"):
        together, why = "score_centering_top_k cannot work", "it needs single turns and a whole model. Leave it out"
        turns += [sharded] if sharded else []  # the head's rows are read after the forward, when a shard is left
    elif sharded and not args.use_vllm:
        together = f"use_vllm=False cannot work under {sharded}"
    elif args.use_vllm and args.world_size > 1:  # one engine may answer several processes in one call
        size, turns = args.vllm_tensor_parallel_size, [name for name in turns if name in _LOOPS]
        server = args.vllm_mode == "server"
        engine = "vllm_mode='server'" if server else f"vllm_tensor_parallel_size={size}" if size > 1 else None
        together = engine and f"{engine} cannot work in {args.world_size} processes"
    if turns and together:
        raise ValueError(f"{turns[0]} with {together}: {why}.")


def _zero_stage(args: QeRLConfig | QeRLRLOOConfig) -> int:
    return 0 if args.deepspeed_plugin is None else args.deepspeed_plugin.zero_stage


def check_environment(args: QeRLConfig | QeRLRLOOConfig) -> None:
    """Before the model is loaded, refuse a setup without a working engine, and replace an unsupported optimizer."""
    zero_stage, fsdp = _zero_stage(args), fsdp_version(args)
    if zero_stage or fsdp is not None:
        check_sharding(args, zero_stage, fsdp)
        settle_optimizer(args)
    if not args.use_vllm:
        return
    check_vllm(OLDEST_VLLM if args.vllm_mode == "colocate" else None)  # TRL's server client imports vLLM too
    if args.vllm_mode == "colocate":
        import_vllm()  # TRL has imported it already


def check_sharding(args: QeRLConfig | QeRLRLOOConfig, zero_stage: int, fsdp_version: int | None) -> None:
    """Raise `ValueError` for sharding that cannot quantize at load, or gather whole tensors layer by layer for vLLM."""
    what = "use_vllm=True" if args.use_vllm else f"base_format={args.base_format!r}"
    if zero_stage == 3 and (args.use_vllm or args.base_format in ("nvfp4", "nf4")):
        way = "DeepSpeed ZeRO-3, which partitions weights while they load"
    elif fsdp_version == 1 and args.use_vllm:
        way = "FSDP version 1, which flattens a layer's weights into one parameter"
    else:
        return
    raise ValueError(
        f"{what} does not work with {way}. Use FSDP 2 (fsdp_version: 2), ZeRO-2 or plain data parallelism."
    )


def checked_rollout_func(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap `function` to check its output: a completion per prompt, and one log-probability per token.

    Unchecked, TRL would broadcast vLLM's lists of candidates into a third dimension, and correct by pairs of tokens.
    """

    @functools.wraps(function)
    def checked(prompts: list, trainer: Any) -> dict[str, Any]:
        output = function(prompts, trainer)
        if not isinstance(output, dict) or "completion_ids" not in output:  # TRL names missing keys
            return output
        tokens, logps = output["completion_ids"], output.get("logprobs")
        lengths = list(map(len, tokens))
        shapes = [(length,) for length in lengths] if logps is None else [tuple(np.shape(row)) for row in logps]
        wrong = [i for i, (length, shape) in enumerate(zip(lengths, shapes, strict=False)) if shape != (length or 1,)]
        if len(tokens) != len(prompts) or len(shapes) != len(prompts) or wrong:
            first = "".join(
                f"; completion {i} has {lengths[i]} tokens and log-probabilities {shapes[i]}" for i in wrong[:1]
            )
            raise RolloutError(
                f"rollout_func returned {len(tokens)} completions and {len(shapes)} log-probabilities for "
                f"{len(prompts)} prompts{first}. Return a completion per prompt and a number per token: value[0] of "
                "each list from vLLM."
            )
        return output

    return checked


def placed_in_training(accelerator: Accelerator) -> bool:
    """Whether the model reaches its device only in `accelerator.prepare`, at the start of training."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def settle_optimizer(args: Any) -> None:
    """Under FSDP, replace an optimizer unable to step sharded parameters ([`optimizer_under_fsdp`])."""
    if fsdp_version(args) is None:
        return
    wanted = str(OptimizerNames(args.optim).value)
    used = optimizer_under_fsdp(wanted)
    if used != wanted:
        logger.warning(
            "optim=%r is a bitsandbytes optimizer, which cannot update parameters sharded by FSDP. This run uses %r "
            "instead. Set optim to it to silence this warning.",
            wanted,
            used,
        )
        args.optim = type(args.optim)(used)
