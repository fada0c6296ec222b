"""What the processes of a run can do, and each `base_format` in vLLM. What cannot work is refused before anything is loaded: combinations of
options when a configuration is made (`support/options.py`), the rest here.

| base_format | colocate mode | server mode |
|---|---|---|
| `nvfp4`, `bf16` | the engine reads the trainer's weights and gets the adapter | the server loads the checkpoint and gets the adapter |
| `nf4` | the same; one engine per process, since 4-bit blocks of bitsandbytes cannot be split | no |
| `full` | the engine has a copy of the weights in the compute dtype; each step streams them in place | no |

Noise on the norms works in all of them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..support.distributed import fsdp_version
from .adapter import check_sharding
from .placement import settle_optimizer
from .vllm.imported import import_vllm
from .vllm.plugin import check_vllm_is_there, check_vllm_version

if TYPE_CHECKING:
    from ..config import QeRLConfig, QeRLRLOOConfig

#: what a trainer may be given that takes as many turns with the engine as it likes
_TURNS = ("rollout_func", "tools", "environment_factory")
#: of those, what goes on in TRL's own loop, with the rows of a process that are not done
_LOOPS = ("tools", "environment_factory")


def check_given(args: "QeRLConfig | QeRLRLOOConfig", given: Mapping[str, Any]) -> None:
    """Refuse what the processes of a run cannot do with what a trainer was given: called before the model is loaded.

    Args:
        given: the trainer's arguments, by name.

    Raises:
        `ValueError`: by name.
    """
    sharded = "FSDP" if fsdp_version(args) is not None else "DeepSpeed ZeRO-3" if _zero_stage(args) == 3 else None
    several = args.world_size > 1 and args.use_vllm and asked_together(args)
    for name in _TURNS:
        if given.get(name) and not args.use_vllm and sharded:
            raise ValueError(
                f"{name} with use_vllm=False cannot work under {sharded}: each forward is collective, and processes take different numbers of turns. "
                "Use use_vllm=True with vllm_mode='colocate', or plain data parallelism."
            )
        if given.get(name) and several and name in _LOOPS:
            raise ValueError(
                f"{name} with {several} cannot work in {args.world_size} processes: each has its own number of turns, and TRL would deal completions to other "
                "prompts. Use vllm_mode='colocate' with vllm_tensor_parallel_size=1."
            )


def asked_together(args: "QeRLConfig | QeRLRLOOConfig") -> str | None:
    """The option by which one engine answers several processes in one call."""
    if args.vllm_mode == "server":
        return "vllm_mode='server'"
    size = args.vllm_tensor_parallel_size
    return f"vllm_tensor_parallel_size={size}" if size > 1 else None


def _zero_stage(args: "QeRLConfig | QeRLRLOOConfig") -> int:
    return getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", 0)


def check_environment(args: "QeRLConfig | QeRLRLOOConfig") -> None:
    """Refuse a process in which the engine could not start, and replace an optimizer that could not step: called before the model is loaded.

    Raises:
        `ImportError`: vLLM is missing, broken or too old.
        `ValueError`: a way of sharding that the weights, the engine or the optimizer cannot follow.
    """
    zero_stage = _zero_stage(args)
    if zero_stage == 3 and args.base_format in ("nvfp4", "nf4"):
        raise ValueError(
            f"base_format={args.base_format!r} does not train under DeepSpeed ZeRO-3, which partitions weights while they load, before they are quantized. "
            "Use FSDP 2 (fsdp_version: 2), ZeRO-2 or plain data parallelism."
        )
    settle_optimizer(args)
    if not args.use_vllm:
        return
    check_sharding(zero_stage, fsdp_version(args))
    check_vllm_is_there()  # TRL's client of a server needs it too
    if args.vllm_mode == "colocate":
        check_vllm_version()
        import_vllm()  # TRL has imported it already
