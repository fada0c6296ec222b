"""What an engine must be told to compute the trainer's model: one record, from which come the arguments of `vllm.LLM`, the `vllm
serve` command, and what a server's answer is compared with.
"""

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from ..memory.workload import MAX_BATCHED_TOKENS
from ..nvfp4.architectures import architecture_of, delta_net_layers
from ..nvfp4.checkpoints import METHOD
from ..nvfp4.config import NVFP4Config
from ..nvfp4.linear import NVFP4Linear, compute_dtype, has_nvfp4
from .adapter import adapter_buffers, linear_layers, short_names
from .wire import BATCH_INVARIANT, WORKER_EXTENSION

#: name of the loader that takes the weights out of the trainer's model (rollout/vllm)
LOAD_FORMAT = "qerl_trainer"
ENDPOINT = "qerl_trl.rollout.vllm.endpoint.RolloutEndpoint"
#: log-probabilities after temperature and truncation, which are the behaviour policy's
LOGPROBS_MODE = "processed_logprobs"
#: which of a checkpoint's files say what the model is: those that the trainer reads. Left to itself vLLM prefers Mistral's own where they
#: lie beside them (params.json, tekken.json)
FILES = {"config_format": "hf", "tokenizer_mode": "hf"}
DELTA_NET = {"gdn_prefill_backend": "triton"}
#: sequences at a time that a server is asked for at most: vLLM's own default on the largest GPUs. It refuses more of them than tokens in a step
#: (2048 by default on small GPUs)
MOST_SERVED = 1024


def at_a_time(args: Any, mode: str, of_an_engine: int | None) -> int | None:
    """`max_num_seqs` of an engine: what TRL computes for one in process, and the completions of all processes for a server, which they share."""
    return min(args.generation_batch_size, MOST_SERVED) if mode == "server" else of_an_engine


@dataclass(frozen=True)
class EngineSpec:
    """The trainer's model as an engine has to build it.

    Args:
        model, revision: the checkpoint, as transformers and vLLM take it.
        dtype: compute dtype, "bfloat16", "float16" or "float32".
        base: "nvfp4", or "dense" for weights that stay as they are (bitsandbytes' too, which only the loader knows).
        scale_rule: block-scale rule where the checkpoint is quantized while it loads; None where its bytes are NVFP4 already.
        ignore: linear layers that stay dense, by the shortest names that work; None where the checkpoint's own config says it.
        adapter: {"rank": ..., "targets": [...]}, the buffers to reserve; None for a model that is trained without one.
        max_model_len: longest sequence, in tokens; None for the model's own limit.
        max_num_seqs: sequences at a time, for which vLLM captures CUDA graphs and keeps buffers; None for its default. A server may have others.
        batch_invariant: whether the engine must compute a sequence to the same bits whatever else is in the batch.
        text_only: whether no pictures can come, so that an engine of a model that sees them builds no tower and keeps no memory for one.
        delta_net: whether layers carry a state in place of keys and values, as Qwen3.5's. vLLM takes its Triton kernels there, since FlashInfer
            compiles its own for minutes; in process without a prefix cache, whose second state per sequence is not planned.
        holds: digest of how each layer of the trainer's model holds its weight, which is how an engine in its process does.
    """

    model: str
    revision: str | None
    dtype: str
    base: str
    scale_rule: str | None
    ignore: tuple[str, ...] | None
    adapter: Mapping[str, Any] | None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    model_impl: str = "auto"
    trust_remote_code: bool = False
    batch_invariant: bool = False
    text_only: bool = False
    delta_net: bool = False
    holds: str | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        scale_rule: str = "rtn",
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        pictures: bool = True,
        **limits: Any,
    ) -> "EngineSpec":
        """From the trainer's model, whose compute dtype is the default of `dtype`. `scale_rule` counts where the model does not
        know its own; `pictures`: whether any may come ([`pictures.may_come`]); `limits` are the fields from
        `max_model_len` on.

        Raises:
            `ValueError`: the model came from no checkpoint, or vLLM cannot roll out its architecture.
        """
        base = cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)
        row = architecture_of(base.config.get_text_config(decoder=True).model_type)
        if row.outside_vllm:
            raise ValueError(f"{type(base).__name__} cannot roll out in vLLM: {row.outside_vllm}. Use use_vllm=False.")
        if not base.name_or_path:
            raise ValueError(
                f"vLLM reads a checkpoint's configuration, and this {type(base).__name__} has no name_or_path. Load it with from_pretrained, or pass "
                "use_vllm=False."
            )
        config = getattr(getattr(base, "hf_quantizer", None), "quantization_config", None)
        at_load = True  # a model that was quantized by hand came from a dense checkpoint
        if isinstance(config, NVFP4Config):
            scale_rule, at_load = config.scale_rule, config.source_format is None
        packed, text = has_nvfp4(base), base.config.get_text_config(decoder=True)
        return cls(
            model=base.name_or_path,
            revision=revision,
            dtype=str(dtype or compute_dtype(model)).removeprefix("torch."),
            base="nvfp4" if packed else "dense",
            scale_rule=scale_rule if packed and at_load else None,
            ignore=tuple(dense_layers(base)) if packed and at_load else None,
            adapter=adapter_buffers(model) if is_peft_model(model) else None,
            text_only=text is not base.config and not pictures,
            delta_net=bool(delta_net_layers(base.config)),
            holds=_held_as(base),
            **limits,
        )

    def options(self) -> dict[str, Any]:
        """`additional_config` of the engine; rollout/vllm/quantization.py reads it."""
        options: dict[str, Any] = {"base": self.base}
        if self.adapter is not None:
            options["adapter"] = dict(self.adapter)
        if self.scale_rule is not None:
            options["scale_rule"] = self.scale_rule
        if self.ignore is not None:
            options["ignore"] = list(self.ignore)
        if self.batch_invariant:
            options["batch_invariant"] = True
        return {"qerl": options}

    def llm_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM` in the trainer's process: TRL's, and ours. Memory and placement come on top.

        `holds` is among the options for vLLM's sake: it keeps compiled graphs on disk by `additional_config`, and one that was traced over dense
        weights finds none of them in a layer of bitsandbytes.
        """
        options = self.options()["qerl"]
        return {
            "model": self.model,
            "revision": self.revision,
            "tokenizer_revision": self.revision,
            "dtype": self.dtype,
            "quantization": METHOD,
            "load_format": LOAD_FORMAT,
            "additional_config": {"qerl": options if self.holds is None else options | {"holds": self.holds}},
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "model_impl": self.model_impl,
            "trust_remote_code": self.trust_remote_code,
            "logprobs_mode": LOGPROBS_MODE,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            **FILES,
            **({"language_model_only": True} if self.text_only else {}),
            **(DELTA_NET | {"enable_prefix_caching": False} if self.delta_net else {}),
        }

    def serve_command(self, host: str = "127.0.0.1", port: int | None = None) -> str:
        """The command that starts a server for this model, as one shell line. Placement may be added.

        The trainer's secret (rollout/signature.py) has to be in its environment.
        """
        command = [f"{BATCH_INVARIANT}=1"] * self.batch_invariant + ["vllm", "serve", self.model]
        options: dict[str, Any] = {
            "revision": self.revision,
            "tokenizer-revision": self.revision,
            "host": host,
            "port": port,
            "dtype": self.dtype,
            "quantization": METHOD,
            "additional-config": json.dumps(self.options()),
            "worker-extension-cls": WORKER_EXTENSION,
            "middleware": ENDPOINT,
            "max-model-len": self.max_model_len,
            "max-num-seqs": self.max_num_seqs,
            "model-impl": None if self.model_impl == "auto" else self.model_impl,
            "logprobs-mode": LOGPROBS_MODE,
            "max-logprobs": -1,
            **{
                name.replace("_", "-"): value for name, value in (FILES | (DELTA_NET if self.delta_net else {})).items()
            },
        }
        command += [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
        command += ["--language-model-only"] * self.text_only
        command += ["--trust-remote-code"] * self.trust_remote_code
        return shlex.join(command)


def _held_as(model: nn.Module) -> str:
    kinds = []
    for name, layer in linear_layers(model).items():
        kind: list[Any] = [name, type(layer).__name__]
        # an NVFP4Linear would decode its weight to answer
        if not isinstance(layer, NVFP4Linear) and (state := getattr(layer.weight, "quant_state", None)) is not None:
            kind += [state.quant_type, str(state.dtype), state.blocksize, state.nested]
        kinds.append(kind)
    return hashlib.blake2b(repr(kinds).encode(), digest_size=8).hexdigest()


def dense_layers(model: nn.Module) -> list[str]:
    """The linear layers of a quantized model that are not packed (the head is one), by the shortest names that work."""
    linears = linear_layers(model)
    return short_names((name for name, layer in linears.items() if not isinstance(layer, NVFP4Linear)), linears)
