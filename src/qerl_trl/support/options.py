"""Combinations of options that no engine can run: refused when a configuration is made."""

import logging
from typing import Any

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


def check_generation(args: Any) -> None:
    """Warn of `generation_kwargs`, which TRL puts over its own arguments, that sample from another policy than the one completions are scored with."""
    assert not isinstance(args.generation_kwargs, str), "TRL's configs parse JSON when they are built"
    for name, value in (args.generation_kwargs or {}).items():
        own = _OWN.get(name)
        if own is not None:
            said = 1 if own == "num_generations" else getattr(args, own)
            if value not in (None, said) and not (own == "max_completion_length" and value < said):
                logger.warning(
                    "generation_kwargs={%r: %r} overrides %s=%r, by which completions are planned and scored. Set %s instead.",
                    *(name, value, own, getattr(args, own), own),
                )
        elif name in _OTHER_POLICY and value not in (None, _OTHER_POLICY[name]):
            logger.warning(
                "generation_kwargs={%r: %r} draws completions from another policy than the one they are scored with. Leave it out.",
                name,
                value,
            )


def check_options(args: Any) -> None:
    """Refuse combinations of options that no engine can run.

    Raises:
        `ValueError`: with the option that can.
    """
    check_generation(args)
    if args.vllm_batch_invariant and not (args.use_vllm and args.base_format == "nvfp4"):
        raise ValueError(
            f"vllm_batch_invariant=True with use_vllm={args.use_vllm} and base_format={args.base_format!r} cannot work: only NVFP4 in vLLM has such "
            "kernels. Pass use_vllm=True and base_format='nvfp4', or leave it out."
        )
    if not args.use_vllm:
        return
    if args.vllm_mode == "server" and args.base_format in _SERVER:
        raise ValueError(
            f"base_format={args.base_format!r} with vllm_mode='server' cannot work: {_SERVER[args.base_format]}. Use vllm_mode='colocate' or "
            "use_vllm=False, or base_format='nvfp4' or 'bf16'."
        )
    check_engine(args)
    if args.base_format == "nf4" and args.vllm_tensor_parallel_size > 1:
        raise ValueError(
            f"base_format='nf4' with vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} cannot work: bitsandbytes weights cannot be split. Use "
            "vllm_tensor_parallel_size=1 or base_format='nvfp4'."
        )


#: of `vllm_engine_kwargs`, what this package tells an engine itself, and what to set instead
_OURS = {
    "model": "model", "revision": "model_init_kwargs", "tensor_parallel_size": "vllm_tensor_parallel_size", "pipeline_parallel_size": None,
    "data_parallel_size": None, "distributed_executor_backend": None, "load_format": None, "quantization": "base_format", "additional_config": None,
    "logprobs_mode": None, "enable_sleep_mode": "vllm_enable_sleep_mode",
}  # fmt: skip
#: methods of speculation that have no weights
_WITHOUT_WEIGHTS = ("ngram", "[ngram]", "ngram_gpu", "suffix")


def check_engine(args: Any) -> None:
    """Refuse arguments of a colocated engine with which it would not be this trainer's.

    Raises:
        `ValueError`: by name.
    """
    chosen = args.vllm_engine_kwargs
    if args.vllm_mode != "colocate" or not isinstance(chosen, dict):
        return
    for name in _OURS.keys() & chosen.keys():
        instead = f"set {_OURS[name]}" if _OURS[name] else "leave it out"
        raise ValueError(f"vllm_engine_kwargs has {name}={chosen[name]!r}, which the trainer sets itself: {instead}.")
    speculation = chosen.get("speculative_config")
    if speculation and (speculation.get("method") or speculation.get("model")) not in _WITHOUT_WEIGHTS:
        raise ValueError(
            f"vllm_engine_kwargs has speculative_config={speculation!r}, and vLLM would load the trainer's weights into the draft. Leave it out, or use "
            f"a method without weights ({', '.join(_WITHOUT_WEIGHTS)})."
        )
    if chosen.get("cpu_offload_gb") and args.share_weights and args.base_format != "full":
        raise ValueError(
            f"vllm_engine_kwargs has cpu_offload_gb={chosen['cpu_offload_gb']!r}, but the engine reads the trainer's weights, which stay on the GPU. Leave "
            "it out, or pass share_weights=False."
        )
