"""What vLLM finds through the entry point `vllm.general_plugins`: the quantization method `qerl_nvfp4` and the loader
`qerl_trainer`.

vLLM calls `register` once in every process it starts, ours or not, so it does two registrations and nothing else: an
engine that does not ask for `quantization="qerl_nvfp4"` runs exactly as without this package. The pieces:

    vllm_quantization  which method a layer gets, from a checkpoint's config or from the trainer's modules
    vllm_linear        the methods: packed or dense base, and the adapter inside them
    vllm_norm          RMSNorm with an fp32 weight, so that small noise survives
    vllm_loader        reads the weights out of the trainer's model (one copy), instead of a folder
    vllm_state         what changes between rollouts: adapter buffers and noisy norms
    vllm_worker        the same through `vllm serve`
    vllm_sleep         frees the KV cache only
"""

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point. Re-entrant; a vLLM whose interfaces have moved is left alone, with a warning."""
    try:
        from . import vllm_loader, vllm_quantization  # noqa: F401  (their decorators register)
    except ImportError as error:
        # raising here would break every engine on this machine, also those that have nothing to do with qerl-trl
        logger.warning(
            "qerl-trl could not register its vLLM quantization method (%s). Engines that do not use it are not affected; "
            "qerl-trl works with vLLM 0.22 to 0.31.",
            error,
        )
