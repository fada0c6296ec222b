"""Settings of an engine for the trainer's model: one record for the arguments of `vllm.LLM`, the `vllm serve` command
and the comparison with a server."""

import hashlib
import json
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, List, Value
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint.fingerprint import stored_vocabulary
from ..memory.workload import MAX_BATCHED_TOKENS
from ..model.lora import adapted_layers, changes_base
from ..nvfp4.architectures import architecture_of, delta_net_layers, in_tower
from ..nvfp4.checkpoints import METHOD, pattern_of
from ..nvfp4.config import NVFP4Config
from ..nvfp4.linear import NVFP4Linear, compute_dtype, compute_of, has_nvfp4
from ..support.names import canonical_name
from .engine import BATCH_INVARIANT, WORKER_EXTENSION

#: loader of weights from the trainer's model (rollout/vllm)
LOAD_FORMAT = "qerl_trainer"
ENDPOINT = "qerl_trl.rollout.vllm.worker.RolloutEndpoint"
#: log-probabilities after temperature and truncation, those of the sampling policy
LOGPROBS_MODE = "processed_logprobs"
#: read the trainer's files: by default vLLM prefers Mistral's own (params.json, tekken.json) if a checkpoint has both
FILES = {"config_format": "hf", "tokenizer_mode": "hf"}
DELTA_NET = {"gdn_prefill_backend": "triton"}
#: largest `max_num_seqs` of a server, which otherwise takes the completions of all processes: vLLM's default on large
#: GPUs, and below its limit, the tokens per step (2048 on small GPUs)
MOST_SERVED = 1024


@dataclass(frozen=True)
class EngineSpec:
    """Description of the trainer's model, from which an engine builds it.

    Args:
        model, revision: the checkpoint, as transformers and vLLM take it.
        dtype: compute dtype, "bfloat16", "float16" or "float32".
        base: "nvfp4", or "dense" for unchanged weights (also of bitsandbytes: only the loader tells these apart).
        scale_rule: block-scale rule of a checkpoint quantized at load; None for an NVFP4 checkpoint.
        ignore: dense linear layers ([`short_names`]); None to follow the checkpoint's config.
        adapter: {"rank": ..., "targets": [...]}, the buffers to reserve; None without an adapter.
        max_model_len: longest sequence, in tokens; None for the model's own limit.
        max_num_seqs: concurrent sequences (vLLM's CUDA graphs and buffers); None for its default. A server may differ.
        batch_invariant: a sequence must have the same bits in every batch.
        text_only: no pictures can come, so an engine of a multimodal model builds no tower.
        delta_net: the model has layers with a recurrent state (Qwen3.5). They run vLLM's Triton kernels (FlashInfer
            compiles for minutes); in process without a prefix cache: its second state per sequence is not planned.
        holds: digest of the weight format of each layer of the trainer's model, for an engine in its process.
        compute: "w4a16", or "w4a8" for products in FP8, as the trainer's NVFP4 layers.
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
    compute: str = "w4a16"

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
        """Describe the trainer's model. `dtype`: its compute dtype by default; `scale_rule`: if its config has none;
        `pictures`: see [`pictures_may_come`]; `limits`: the fields from `max_model_len` on."""
        base = cast(PreTrainedModel, model.get_base_model() if isinstance(model, PeftModel) else model)
        row = architecture_of(base.config.get_text_config(decoder=True).model_type)
        if row.outside_vllm:
            raise ValueError(f"{type(base).__name__} cannot roll out in vLLM: {row.outside_vllm}. Use use_vllm=False.")
        quantizer = getattr(base, "hf_quantizer", None)
        config = quantizer and quantizer.quantization_config
        at_load = True  # a model quantized by hand came from a dense checkpoint
        if isinstance(config, NVFP4Config):
            scale_rule, at_load = config.scale_rule, config.source_format is None
        packed, text, linears = has_nvfp4(base), base.config.get_text_config(decoder=True), linear_layers(base)
        dense = [name for name, layer in linears.items() if not isinstance(layer, NVFP4Linear)]  # the head is one
        return cls(
            model=base.name_or_path or "",
            revision=revision,
            dtype=str(dtype or compute_dtype(model)).removeprefix("torch."),
            base="nvfp4" if packed else "dense",
            scale_rule=scale_rule if packed and at_load else None,
            ignore=tuple(short_names(dense, linears)) if packed and at_load else None,
            adapter=adapter_buffers(model) if is_peft_model(model) else None,
            text_only=text is not base.config and not pictures,
            delta_net=bool(delta_net_layers(base.config)),
            holds=_held_as(base),
            compute=compute_of(base),
            **limits,
        )

    def options(self) -> dict[str, Any]:
        """Return the engine's `additional_config`, which rollout/vllm/quantization.py reads."""
        options = {
            "base": self.base,
            "adapter": self.adapter and dict(self.adapter),
            "scale_rule": self.scale_rule,
            "ignore": None if self.ignore is None else list(self.ignore),
            "batch_invariant": self.batch_invariant or None,
            "compute": None if self.compute == "w4a16" else self.compute,
        }
        return {"qerl": {name: value for name, value in options.items() if value is not None}}

    def llm_arguments(self) -> dict[str, Any]:
        """Return keyword arguments of `vllm.LLM` in the trainer's process, except memory and placement.

        `holds` keys vLLM's disk cache of compiled graphs, which covers `additional_config`: a graph traced over dense
        weights fails on layers of bitsandbytes.
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
        """Return the command that starts a server for this model, without placement. The server needs the secret."""
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
        } | FILES | (DELTA_NET if self.delta_net else {})  # fmt: skip
        for name, value in options.items():
            command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        command += ["--language-model-only"] * self.text_only
        command += ["--trust-remote-code"] * self.trust_remote_code
        return shlex.join(command)


def _held_as(model: nn.Module) -> str:
    kinds = []
    for name, layer in linear_layers(model).items():
        kind: list[Any] = [name, type(layer).__name__]
        # reading `weight` of an NVFP4Linear would decode it
        if not isinstance(layer, NVFP4Linear) and (state := getattr(layer.weight, "quant_state", None)) is not None:
            kind += [state.quant_type, str(state.dtype), state.blocksize, state.nested]
        kinds.append(kind)
    return hashlib.blake2b(repr(kinds).encode(), digest_size=8).hexdigest()


def active_adapter(model: nn.Module) -> str:
    """Return the name of the trained adapter."""
    return cast(PeftModel, model).active_adapters[0]


def rollout_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the layers with the active adapter, by canonical name."""
    adapter = active_adapter(model)
    return {canonical_name(n): layer for n, layer in adapted_layers(model).items() if adapter in layer.lora_A}


def check_servable(model: nn.Module) -> None:
    """Raise `ValueError` for an adapter that our vLLM quantization method cannot apply."""
    configs, adapter = cast(PeftModel, model).peft_config, active_adapter(model)
    config = configs[adapter]
    problems = []
    if len(active := cast(PeftModel, model).active_adapters) != 1:
        problems.append(f"{', '.join(active)} active at once")
    if set(configs) - {adapter, "ref"}:  # TRL's reference policy stays in the trainer
        problems.append(f"several adapters ({', '.join(configs)})")
    if not isinstance(config, LoraConfig):
        problems.append(f"{type(config).__name__}, not LoRA")
    else:
        own = vars(config)
        problems += [f"{flag}={own[flag]!r}" for flag in ("use_dora", "lora_bias") if own[flag]]
        if changes_base(model):  # a server loads the unchanged base
            problems.append(f"bias={config.bias!r} with init_lora_weights={config.init_lora_weights!r}")
        problems += [name for name in ("trainable_token_indices", "target_parameters") if own[name]]
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper) and module.original_module.weight.ndim != 1:
            problems.append(f"modules_to_save with {canonical_name(name)}")
        if isinstance(module, LoraLayer) and adapter in module.lora_embedding_A:
            problems.append(f"an adapter on the embeddings {canonical_name(name)}")
    layers = [canonical_name(name) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    if towers := [name for name in layers if in_tower(name)]:
        tower = next(part for part in towers[0].split(".") if in_tower(part))
        remedy = f"set exclude_modules={pattern_of([tower])!r}"
        problems.append(f"an adapter on {len(towers)} layers of a tower for pictures ({remedy})")
    if problems:
        raise ValueError(
            f"vLLM rollouts cannot carry this adapter: {'; '.join(problems)}. Use plain LoRA on one set of linear "
            "target_modules (norms may be in modules_to_save), or use_vllm=False."
        )


def check_vocabulary(model: nn.Module) -> None:
    """Refuse a model with resized embeddings (`ValueError`): an engine loads the original checkpoint."""
    resized, stored = cast(Any, model.config).get_text_config().vocab_size, stored_vocabulary(model)
    if stored not in (None, resized):
        raise ValueError(
            f"The model has {resized} embeddings, and its checkpoint, which vLLM loads, has {stored}. Train from a "
            "folder to which the resized model is saved, or pass use_vllm=False."
        )


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return all linear layers of a model, packed or dense, with or without adapter, by canonical name."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {canonical_name(name): module for name, module in found.items() if ".lora_" not in name}


def short_names(chosen: Iterable[str], everything: Iterable[str]) -> list[str]:
    """Shorten the names `chosen` among `everything` to a last component where all names with it are chosen."""
    chosen, by_leaf = set(chosen), defaultdict(set)
    for name in everything:
        by_leaf[name.rpartition(".")[2]].add(name)
    short: list[str] = []
    for leaf, names in sorted(by_leaf.items()):
        short += [leaf] if names <= chosen else sorted(names & chosen)
    return short


def adapter_buffers(model: nn.Module) -> dict[str, Any]:
    """Return the engine's option `adapter` for a PEFT model: largest rank, and names of layers ([`short_names`])."""
    layers, adapter = rollout_layers(model), active_adapter(model)
    rank = max(layer.r[adapter] for layer in layers.values())
    return {"rank": rank, "targets": short_names(layers, linear_layers(model))}


def trained_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the trained norms (`modules_to_save`), by canonical name."""
    adapter, norms = active_adapter(model), {}
    for name, module in model.named_modules():
        wrapped = isinstance(module, ModulesToSaveWrapper) and module.original_module.weight.ndim == 1
        if wrapped and adapter in module.modules_to_save:
            norms[canonical_name(name)] = module.modules_to_save[adapter]
    return norms


def pictures_may_come(processing_class: Any, data: Iterable[Any], plays: bool) -> bool:
    """Whether prompts may have pictures, by the training and evaluation data; `True` for streamed or transformed data.

    A tokenizer means no pictures in TRL. `plays`: tools, environments or a rollout function may add pictures.
    """
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return False
    return plays or not all(_of_text(rows) for rows in data if rows is not None)


def _of_text(data: Any) -> bool:
    """Whether all prompts are surely text: strings, or messages with a string (not a list of parts) as content."""
    if not isinstance(data, Dataset) or data.format["type"] == "custom" or "prompt" not in data.column_names:
        return False
    prompt: Any = data.features["prompt"]
    messages = prompt[0] if isinstance(prompt, list) else prompt.feature if isinstance(prompt, List) else prompt
    content = messages.get("content") if isinstance(messages, Mapping) else messages
    text = isinstance(content, Value) and content.dtype in ("string", "large_string")
    return text and not {"image", "images"} & {*data.column_names}
