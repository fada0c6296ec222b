"""What each `base_format` can do in vLLM. Whatever cannot work is refused here, before anything is loaded.

| base_format | colocate mode | server mode |
|---|---|---|
| `nvfp4`, `bf16` | the engine reads the trainer's weights and gets the adapter | the server loads the checkpoint and gets the adapter |
| `nf4` | the same; one engine per process, since 4-bit blocks of bitsandbytes cannot be split | no |
| `full` | the engine has a copy of the weights in the compute dtype; each step streams them in place | no |

Noise on the norms works in all of them.
"""

import os
from typing import TYPE_CHECKING

from .adapter import check_sharding
from .vllm.imported import import_vllm
from .vllm.plugin import check_vllm_is_there, check_vllm_version

if TYPE_CHECKING:
    from ..config import QeRLConfig, QeRLRLOOConfig

_SERVER = {
    "full": "every weight changes at each step, and the server takes adapters and norms only",
    "nf4": "the server's vLLM reads the checkpoint itself and has no bitsandbytes weights",
}


def check_options(args: "QeRLConfig | QeRLRLOOConfig") -> None:
    """Refuse combinations of options that no engine can run.

    Raises:
        `ValueError`: with the option that can.
    """
    if not args.use_vllm:
        return
    if args.vllm_mode == "server" and args.base_format in _SERVER:
        raise ValueError(
            f"base_format={args.base_format!r} with vllm_mode='server' cannot work: {_SERVER[args.base_format]}. Use "
            "vllm_mode='colocate' or use_vllm=False, or train LoRA on a base that a server can load (base_format='nvfp4' or "
            "'bf16')."
        )
    if args.base_format == "nf4" and args.vllm_tensor_parallel_size > 1:
        raise ValueError(
            f"base_format='nf4' with vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} cannot work: bitsandbytes "
            "weights cannot be split over GPUs. Use vllm_tensor_parallel_size=1 (each process then has an engine), or "
            "base_format='nvfp4'."
        )


def check_environment(args: "QeRLConfig | QeRLRLOOConfig") -> None:
    """Refuse a process in which the engine could not start: called before the model is loaded.

    Raises:
        `ImportError`: vLLM is missing, broken, or a version that was never tested.
        `ValueError`: a way of sharding that the weights or the engine cannot follow.
    """
    zero_stage = getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", 0)
    if zero_stage == 3 and args.base_format in ("nvfp4", "nf4"):
        raise ValueError(
            f"base_format={args.base_format!r} does not train under DeepSpeed ZeRO-3, which partitions weights while they load, before they are "
            "quantized. Use FSDP 2 (fsdp_version: 2), which shards the packed weights, ZeRO-2, or plain data parallelism."
        )
    if not args.use_vllm:
        return
    fsdp_version = (getattr(args, "fsdp_plugin_args", None) or {}).get("fsdp_version")
    if fsdp_version is None and os.environ.get("ACCELERATE_USE_FSDP", "").lower() in (
        "1",
        "true",
    ):  # accelerate launch with an FSDP configuration
        fsdp_version = int(os.environ.get("FSDP_VERSION", "1"))
    check_sharding(zero_stage, fsdp_version)
    check_vllm_is_there()  # TRL's client of a server needs it too
    if args.vllm_mode == "colocate":
        check_vllm_version()
        import_vllm()  # TRL has imported it already
