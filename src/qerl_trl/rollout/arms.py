"""What each `base_format` can do in vLLM. Whatever cannot work is refused here, before anything is loaded.

| base_format | colocate mode | server mode |
|---|---|---|
| `nvfp4`, `bf16` | the engine reads the trainer's weights and gets the adapter | the server loads the checkpoint and gets the adapter |
| `nf4` | the same; one engine per process, since 4-bit blocks of bitsandbytes cannot be split | no |
| `full` | the engine has a copy of the weights in the compute dtype; each step streams them in place | no |

Noise on the norms works in all of them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .adapter import check_sharding
from .placement import check_optimizer_given, fsdp_version, settle_optimizer
from .vllm.imported import import_vllm
from .vllm.plugin import check_vllm_is_there, check_vllm_version

if TYPE_CHECKING:
    from ..config import QeRLConfig, QeRLRLOOConfig

_SERVER = {
    "full": "every weight changes at each step, and the server takes adapters and norms only",
    "nf4": "the server's vLLM reads the checkpoint itself and has no bitsandbytes weights",
}


#: of `generation_kwargs`, what an argument of its own says, by which lengths are planned and completions are scored: name -> that argument
_OWN = {
    "temperature": "temperature", "max_new_tokens": "max_completion_length", "max_tokens": "max_completion_length",
    "num_return_sequences": "num_generations", "n": "num_generations",
}  # fmt: skip
#: the same, what makes another policy than the one that is scored, whatever its value is but for these
_OTHER_POLICY: dict[str, tuple[Any, ...]] = {
    "do_sample": (True,), "num_beams": (1,), "num_beam_groups": (1,), "use_beam_search": (False,), "penalty_alpha": (0, 0.0), "guidance_scale": (1, 1.0),
    "dola_layers": (), "sequence_bias": (), "watermarking_config": (), "constraints": (), "force_words_ids": (), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "encoder_repetition_penalty": (1, 1.0), "generation_config": (),
}  # fmt: skip


def check_generation(args: "QeRLConfig | QeRLRLOOConfig") -> None:
    """Refuse `generation_kwargs` that make the rollout another policy than the one that its tokens are scored with. TRL puts them over its own
    arguments, for transformers (`GenerationConfig`) and vLLM (`SamplingParams`) alike. What leaves tokens out (`min_p`, `top_p`, penalties) may stand
    there: it is not scored from TRL's arguments either, and `mismatch.gap_bounds` knows of it.

    Raises:
        `ValueError`: says what to set instead.
    """
    given = args.generation_kwargs or {}
    assert isinstance(given, dict), "TRL's configs parse JSON when they are built"
    for name, value in given.items():
        if value is None:
            continue
        if (own := _OWN.get(name)) is not None:
            said = 1 if own == "num_generations" else getattr(args, own)
            if value == said or (own == "max_completion_length" and isinstance(value, int) and 0 < value < said):
                continue
            what = (
                f"rollouts would be sampled at {value!r} and scored at temperature={said!r}"
                if name == "temperature"
                else f"that is said by {own}={getattr(args, own)!r}, by which lengths, memory and groups are planned"
            )
            raise ValueError(
                f"generation_kwargs={{{name!r}: {value!r}}}: {what}. Leave it out, and set {own} (--{own})."
            )
        if name in _OTHER_POLICY and value not in _OTHER_POLICY[name]:
            lower = "; for completions that differ less, lower temperature (--temperature)"
            remedy = "Leave it out" + lower * (name == "do_sample")
            raise ValueError(
                f"generation_kwargs={{{name!r}: {value!r}}}: completions would not be drawn from the policy that they are scored with, the softmax of "
                f"the model's logits at temperature={args.temperature:g} up to {args.max_completion_length} tokens or the tokenizer's end. {remedy}."
            )


def check_options(args: "QeRLConfig | QeRLRLOOConfig") -> None:
    """Refuse combinations of options that no engine can run.

    Raises:
        `ValueError`: with the option that can.
    """
    check_generation(args)
    if args.vllm_batch_invariant and not (args.use_vllm and args.base_format == "nvfp4"):
        raise ValueError(
            f"vllm_batch_invariant=True with use_vllm={args.use_vllm} and base_format={args.base_format!r} cannot work: only the NVFP4 products of "
            "a rollout in vLLM have such kernels. Pass use_vllm=True and base_format='nvfp4', or leave it out."
        )
    if not args.use_vllm:
        return
    if args.vllm_mode == "server" and args.base_format in _SERVER:
        raise ValueError(
            f"base_format={args.base_format!r} with vllm_mode='server' cannot work: {_SERVER[args.base_format]}. Use "
            "vllm_mode='colocate' or use_vllm=False, or train LoRA on a base that a server can load (base_format='nvfp4' or "
            "'bf16')."
        )
    check_engine(args)
    if args.base_format == "nf4" and args.vllm_tensor_parallel_size > 1:
        raise ValueError(
            f"base_format='nf4' with vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} cannot work: bitsandbytes "
            "weights cannot be split over GPUs. Use vllm_tensor_parallel_size=1 (each process then has an engine), or "
            "base_format='nvfp4'."
        )


#: of `vllm_engine_kwargs`, what this package tells an engine itself, and what to set instead
_OURS = {
    "model": "model", "revision": "model_init_kwargs", "tensor_parallel_size": "vllm_tensor_parallel_size", "pipeline_parallel_size": None,
    "data_parallel_size": None, "distributed_executor_backend": None, "load_format": None, "quantization": "base_format", "additional_config": None,
    "logprobs_mode": None, "enable_sleep_mode": "vllm_enable_sleep_mode",
}  # fmt: skip
#: methods of speculation that have no weights
_WITHOUT_WEIGHTS = ("ngram", "[ngram]", "ngram_gpu", "suffix")


def check_engine(args: "QeRLConfig | QeRLRLOOConfig") -> None:
    """Refuse arguments of a colocated engine with which it would not be this trainer's.

    Raises:
        `ValueError`: by name.
    """
    chosen = args.vllm_engine_kwargs
    if args.vllm_mode != "colocate" or not isinstance(chosen, dict):
        return
    for name in _OURS.keys() & chosen.keys():
        instead = f"set {_OURS[name]}" if _OURS[name] else "leave it out"
        raise ValueError(
            f"vllm_engine_kwargs has {name}={chosen[name]!r}, which the trainer tells its engine itself, so that it computes what is trained: {instead}."
        )
    speculation = chosen.get("speculative_config")
    if speculation is not None and not isinstance(speculation, dict):
        raise ValueError(
            f"vllm_engine_kwargs has speculative_config={speculation!r}, which is no mapping: say {{'method': 'ngram', ...}}."
        )
    if speculation and (speculation.get("method") or speculation.get("model")) not in _WITHOUT_WEIGHTS:
        raise ValueError(
            f"vllm_engine_kwargs has speculative_config={speculation!r}: a draft has weights of its own, and vLLM would load the trainer's into it. Leave it "
            f"out, or use a method without weights ({', '.join(_WITHOUT_WEIGHTS)})."
        )
    if chosen.get("cpu_offload_gb") and args.share_weights and args.base_format != "full":
        raise ValueError(
            f"vllm_engine_kwargs has cpu_offload_gb={chosen['cpu_offload_gb']!r}, and the engine reads the trainer's own weights, which stay on the GPU. Leave "
            "it out, or give the engine a copy: share_weights=False."
        )


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
    check_optimizer_given(args, given)
    sharded = "FSDP" if fsdp_version(args) is not None else "DeepSpeed ZeRO-3" if _zero_stage(args) == 3 else None
    several = args.world_size > 1 and args.use_vllm and asked_together(args)
    for name in _TURNS:
        if given.get(name) and not args.use_vllm and sharded:
            raise ValueError(
                f"{name} with use_vllm=False cannot work under {sharded}: each forward gathers weights from all processes, and these take different "
                "numbers of turns. Use use_vllm=True with vllm_mode='colocate', or plain data parallelism."
            )
        if given.get(name) and several and name in _LOOPS:
            raise ValueError(
                f"{name} with {several} cannot work in {args.world_size} processes: TRL asks the engine for all of them at once, and each goes on with "
                "as many rows and turns as its own completions need, so that completions would be dealt to other prompts. Use "
                "vllm_mode='colocate' with vllm_tensor_parallel_size=1, an engine in each process."
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
            f"base_format={args.base_format!r} does not train under DeepSpeed ZeRO-3, which partitions weights while they load, before they are "
            "quantized. Use FSDP 2 (fsdp_version: 2), which shards the packed weights, ZeRO-2, or plain data parallelism."
        )
    settle_optimizer(args)
    if not args.use_vllm:
        return
    check_sharding(zero_stage, fsdp_version(args))
    check_vllm_is_there()  # TRL's client of a server needs it too
    if args.vllm_mode == "colocate":
        check_vllm_version()
        import_vllm()  # TRL has imported it already
