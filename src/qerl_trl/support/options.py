"""Combinations of options unsupported by all engines: refused when a configuration is made."""

import logging
from collections.abc import Container
from typing import Any

logger = logging.getLogger(__name__)

#: keys of `generation_kwargs` with a TRL argument, used to plan lengths and score completions
_OWN = {
    "temperature": "temperature", "max_new_tokens": "max_completion_length", "max_tokens": "max_completion_length",
    "num_return_sequences": "num_generations", "n": "num_generations",
}  # fmt: skip
#: keys without a TRL argument, with the value that samples from the softmax of the logits
_OTHER_POLICY = {"do_sample": True, "num_beams": 1, "guidance_scale": 1, "penalty_alpha": 0}


def check_generation(args: Any) -> None:
    """Warn if `generation_kwargs`, which override TRL's arguments, sample from another policy than is scored."""
    planned = vars(args) | {"num_generations": 1}
    for name, value in (args.generation_kwargs or {}).items():
        own = _OWN.get(name)
        meant = _OTHER_POLICY.get(name) if own is None else planned[own]
        shorter = own == "max_completion_length" and value is not None and value < meant
        if name in {*_OWN, *_OTHER_POLICY} and value not in (None, meant) and not shorter:
            logger.warning(
                "generation_kwargs={%r: %r} samples completions from another policy than the one that TRL scores them "
                "with. %s.",
                *(name, value, f"Set {own} instead: it overrides {own}={vars(args)[own]!r}" if own else "Leave it out"),
            )


def check_options(args: Any) -> None:
    """Raise `ValueError` for options that no engine supports together; the message has a supported option."""
    check_generation(args)
    check_centering(args)
    if args.vllm_batch_invariant and not (args.use_vllm and args.base_format == "nvfp4"):
        raise ValueError(
            f"vllm_batch_invariant=True with use_vllm={args.use_vllm} and base_format={args.base_format!r} cannot "
            "work: only NVFP4 in vLLM has such kernels. Pass use_vllm=True, base_format='nvfp4', or leave it out."
        )
    # tensor-parallel ranks would each scale their own slice of a token, unlike the trainer
    if args.compute != "w4a16" and (args.base_format != "nvfp4" or args.vllm_tensor_parallel_size > 1):
        raise ValueError(
            f"compute={args.compute!r} with base_format={args.base_format!r} and vllm_tensor_parallel_size="
            f"{args.vllm_tensor_parallel_size} cannot work. Pass 'nvfp4' and size 1, or leave compute out."
        )
    if not args.use_vllm:
        return
    server, ranks = args.vllm_mode == "server", args.vllm_tensor_parallel_size
    if (server and args.base_format in ("full", "nf4")) or (args.base_format == "nf4" and ranks > 1):
        raise ValueError(
            f"base_format={args.base_format!r} with vllm_mode={args.vllm_mode!r} and vllm_tensor_parallel_size={ranks} "
            "cannot work: it needs vllm_mode='colocate', and 'nf4' also size 1. Pass these, or base_format='nvfp4'."
        )
    check_engine(args)


#: values that score centering (update/one_pass.py) knows: log-probabilities of up to 20 tokens, weights per token
_CENTERED: dict[str, Container[Any]] = {
    "score_centering_top_k": tuple(range(1, 21)), "use_vllm": (True,), "loss_type": ("dapo", "grpo", "bnpo", "dr_grpo"),
    "importance_sampling_level": ("token",), "vllm_importance_sampling_mode": ("token_truncate", "token_mask"),
    "top_entropy_quantile": (1.0,), "off_policy_mask_threshold": (None,),
}  # fmt: skip


def check_centering(args: Any) -> None:
    """Raise `ValueError` for an option that does not work with `score_centering_top_k` (not in RLOO)."""
    given = vars(args)
    for name, known in _CENTERED.items() if given.get("score_centering_top_k") is not None else ():
        if given[name] not in known:
            raise ValueError(f"{name}={given[name]!r} cannot work with score_centering_top_k. Pass one of {known}.")


#: keys of `vllm_engine_kwargs` set by this package, and the setting to use instead
_OURS = {
    "model": "model", "revision": "model_init_kwargs", "tensor_parallel_size": "vllm_tensor_parallel_size",
    "pipeline_parallel_size": None, "data_parallel_size": None, "distributed_executor_backend": None,
    "load_format": None, "quantization": "base_format", "additional_config": None, "logprobs_mode": None,
    "enable_sleep_mode": "vllm_enable_sleep_mode",
}  # fmt: skip
#: methods of speculation without weights
_WITHOUT_WEIGHTS = ("ngram", "[ngram]", "ngram_gpu", "suffix")


def check_engine(args: Any) -> None:
    """Raise `ValueError` for arguments of a colocated engine that conflict with its trainer, by name."""
    chosen = args.vllm_engine_kwargs
    if args.vllm_mode != "colocate" or not chosen:
        return
    for name in _OURS.keys() & chosen.keys():
        instead = f"set {_OURS[name]}" if _OURS[name] else "leave it out"
        raise ValueError(f"vllm_engine_kwargs has {name}={chosen[name]!r}, which the trainer sets itself: {instead}.")
    speculation = chosen.get("speculative_config")
    if speculation and (speculation.get("method") or speculation.get("model")) not in _WITHOUT_WEIGHTS:
        raise ValueError(
            f"vllm_engine_kwargs has speculative_config={speculation!r}, and vLLM would load the trainer's weights "
            f"into the draft. Leave it out, or use a method without weights ({', '.join(_WITHOUT_WEIGHTS)})."
        )
