"""Fingerprint of a base model's weights as loaded, to recognise an adapter's base by content.

It covers every parameter of the base, by its name in the checkpoint and its shape: the bytes of packed layers, all
other values as float32. So a base has one fingerprint for any source (bf16 weights quantized while loading, their NVFP4
folder), with or without an adapter, on any device, and in any lossless dtype. Not covered: buffers, tokenizer.

Checksums are sums of 64-bit integers on the tensors' device: exact in any order, and sensitive to a changed bit or two
swapped elements. They detect mistakes, not forgery. [`base_config`] records the model's configuration with it.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, is_peft_model
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig

from ..support import secrets
from ..support.files import commit_of
from ..support.names import canonical_name, is_part

#: 64-bit words per step; a few times their 8 bytes of memory
_CHUNK = 2**21
#: odd random constants: for a word's place, and for the two mixing steps
_PLACE, _FIRST, _SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
#: beginnings of the name parts that an adapter adds to a parameter
_ADAPTERS = re.compile(r"(?:^|\.)(?:lora_|modules_to_save|trainable_tokens_)")
#: configuration fields without effect on a forward, or set by loading and training
_NOT_OF_A_FORWARD = re.compile(
    r"_.*|transformers_version|(?:torch_)?dtype|quantization_config|architectures|auto_map|use_cache"
    r"|tie_word_embeddings|initializer_range|(?:bos|eos|pad|sep|cls|mask)_token_id"
    r"|(?:id2label|label2id|problem_type|tags)"
)


MERGED = "The adapter is merged into the model already. Call unmerge_adapter() first, then save or export."
#: largest base compared at every checkpoint on a CPU, which reads 100 MB per second
_SLOW_BYTES = 1 << 28


class FingerprintRow(NamedTuple):
    """One parameter in the fingerprint: name in the checkpoint, shape, "float" or dtype, sum over its content."""

    name: str
    shape: list[int]
    kind: str
    total: int


def base_sha256(model: nn.Module, device: torch.device | None = None) -> str | None:
    """Compute the fingerprint of the model without its adapters; `None` if sharded or offloaded.

    Args:
        device: for the computation, tensor by tensor; each tensor's own by default.
    """
    rows = []
    for path, parameter in model.named_parameters():  # tied ones once
        if is_trained(path):
            continue
        name = canonical_name(path)
        tensors = {name: parameter}
        if (state := getattr(parameter, "quant_state", None)) is not None:  # bitsandbytes: with its scales
            tensors |= {f"{name}.{key}": value for key, value in state.as_dict().items()}
        for key, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.is_meta or is_part(tensor):
                return None
            rows.append(row_of(key, tensor if device is None else tensor.to(device)))
    return sha256_of(rows)


def row_of(name: str, tensor: torch.Tensor) -> FingerprintRow:
    """Compute the row of one parameter, for a fingerprint of tensors never together in memory."""
    return FingerprintRow(name, list(tensor.shape), _kind(tensor), int(_checksum(tensor.detach())))


def _kind(tensor: torch.Tensor) -> str:
    return "float" if tensor.is_floating_point() else str(tensor.dtype)


def sha256_of(rows: Iterable[FingerprintRow]) -> str:
    """Compute the fingerprint of all rows, in any order."""
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()


def shared_base_sha256(model: nn.Module, each: bool = True) -> str | None:
    """Compute [`base_sha256`] on this process's device. With FSDP (not `each`), get the main process's: collective."""
    state = PartialState()
    found = base_sha256(model, state.device) if each or state.is_main_process else None
    return found if each or state.num_processes == 1 else gather_object([found])[0]


def base_revision(model: nn.Module) -> str | None:
    """Return the Hub commit of the loaded base; `None` for a folder, or if unknown."""
    return commit_of(cast(PretrainedConfig, model.config))


def stored_vocabulary(model: Any) -> int | None:
    """Return the number of embeddings in a model's checkpoint; `None` if it is not available."""
    try:
        config = type(model.config).from_pretrained(model.config.name_or_path, revision=base_revision(model))
    except OSError:
        return None
    return cast(int, config.get_text_config().vocab_size)


def take_embeddings(model: Any, folder: str | os.PathLike) -> bool:
    """Copy embeddings with added tokens from an adapter's file to a resized base. Returns whether the file has any."""
    from peft import PeftConfig  # slow import, needed here only
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    if not (file := Path(folder, SAFETENSORS_WEIGHTS_NAME)).is_file():
        return False
    # with modules_to_save, the base's name belongs to the trained copy
    mark = ".original_module." if PeftConfig.from_pretrained(str(folder)).modules_to_save else ""
    base: Any = model.get_base_model() if is_peft_model(model) else model
    modules = (base.get_input_embeddings(), base.get_output_embeddings())
    names = {f"{name}.weight" for name, module in base.named_modules() if module in modules}
    with safe_open(file, framework="pt") as stored:
        ours = [key for key in stored.keys() if mark in key and not is_trained(key)]  # noqa: SIM118
        keys = {canonical_name(key): key for key in ours}
        rows = {name: stored.get_tensor(keys[name]) for name in names & keys.keys()}
    now: tuple[int, ...] = tuple(modules[0].weight.shape)
    then: tuple[int, ...] = next((tuple(tensor.shape) for tensor in rows.values()), ())
    if now[1:] != then[1:]:
        return False
    if now != then:
        base.resize_token_embeddings(then[0], mean_resizing=False)
    with torch.no_grad():
        for name, parameter in base.named_parameters(remove_duplicate=False):
            if not is_trained(name) and canonical_name(name) in rows:
                parameter.copy_(rows[canonical_name(name)])
    return True


def base_config(model: nn.Module) -> dict[str, Any]:
    """Return the configuration of the base's forward, as JSON, without its class's defaults: equal for a dense base and
    the NVFP4 base made of it, and in newer releases of transformers. The fingerprint covers tied weights."""
    found = _of_a_forward(cast(PretrainedConfig, model.config))
    return cast(dict[str, Any], secrets.cleaned(found))  # written to files and messages


def _of_a_forward(config: PretrainedConfig) -> dict[str, Any]:
    """Select the fields of [`base_config`], in nested configurations too."""
    default = {} if getattr(config, "has_no_defaults_at_init", False) else _as_json(type(config)())
    found: dict[str, Any] = {}
    for name, value in _as_json(config).items():
        inner = getattr(config, name, None)
        if isinstance(inner, PretrainedConfig):
            found[name] = _of_a_forward(inner)
        elif name == "model_type" or (value != default.get(name) and not _NOT_OF_A_FORWARD.fullmatch(name)):
            found[name] = value
    return found


def _as_json(config: PretrainedConfig) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(json.dumps(config.to_dict(), default=str)))


def is_trained(name: str) -> bool:
    """Return whether a parameter of that name belongs to an adapter."""
    return _ADAPTERS.search(name) is not None


@torch.no_grad()
def _checksum(tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Sum a tensor's 64-bit words, each mixed with its place (from `first`): int64 (), on the tensor's device."""
    flat = tensor.reshape(-1)
    size = 4 if flat.is_floating_point() else flat.element_size()
    places = torch.arange(min(_CHUNK, -(-flat.numel() * size // 8)), device=flat.device) * _PLACE
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for index, part in enumerate(flat.split(_CHUNK * 8 // size)):
        # bytes (of floats as float32), padded with zeros
        plain = (part.float() if part.is_floating_point() else part).contiguous().view(torch.uint8)
        if rest := plain.numel() % 8:
            plain = nn.functional.pad(plain, (0, 8 - rest))
        if plain.storage_offset() % 8:
            plain = plain.clone()
        words = plain.view(torch.int64)
        mixed = (words + places[: words.numel()]).add_(_signed((first + index * _CHUNK) * _PLACE)).mul_(_FIRST)
        total += mixed.bitwise_xor_(mixed >> 31).mul_(_SECOND).sum()
    return total


class Pieces:
    """Compute the row of a parameter from consecutive slices of its first dimension."""

    def __init__(self, name: str, shape: Iterable[int], device: str | torch.device = "cpu") -> None:
        self._name, self._shape, self._device = name, list(shape), device
        self._total, self._words, self._kind = 0, 0, ""
        self._rest: torch.Tensor | None = None

    def add(self, piece: torch.Tensor) -> None:
        self._kind = _kind(piece)
        flat = piece.to(self._device).reshape(-1)
        if self._rest is not None:
            flat = torch.cat([self._rest, flat])
        per_word = 8 // (4 if flat.is_floating_point() else flat.element_size())
        whole = flat.numel() - flat.numel() % per_word
        self._rest = flat[whole:].clone() if whole < flat.numel() else None
        self._total += int(_checksum(flat[:whole], self._words)) if whole else 0
        self._words += whole // per_word

    def row(self) -> FingerprintRow:
        last = 0 if self._rest is None else int(_checksum(self._rest, self._words))
        return FingerprintRow(self._name, self._shape, self._kind, _signed(self._total + last))


def _signed(number: int) -> int:
    """Wrap a number to a signed 64-bit integer."""
    return (number + 2**63) % 2**64 - 2**63


def check_base(model: nn.Module, began_with: str | None, in_the_middle: bool = False) -> None:
    """Check that the base is unchanged.

    Args:
        began_with: fingerprint of the base at the start of the run, `None` if unknown.
        in_the_middle: called for a checkpoint: a large base on a CPU is checked only at the end of the run.

    Raises:
        `RuntimeError`: the adapter is merged, or a frozen weight changed.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer  # slow import, needed here only

    if any(isinstance(module, BaseTunerLayer) and module.merged for module in model.modules()):
        raise RuntimeError(MERGED)
    slow = next(model.parameters()).device.type == "cpu" and sum(p.nbytes for p in model.parameters()) > _SLOW_BYTES
    if began_with is None or not is_peft_model(model) or (in_the_middle and slow):
        return
    if (now := base_sha256(model)) not in (None, began_with):
        raise RuntimeError(
            f"The frozen base has other weights ({str(now)[:12]}) than when the run began ({began_with[:12]}), as "
            "after a merge and unmerge. Call save_adapter and merge from its folder, or resume from the last "
            "checkpoint."
        )
