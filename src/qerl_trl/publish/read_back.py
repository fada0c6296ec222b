"""What a folder computes that was just written: its tensors are read back, layer by layer, and the fixed prompt goes through (forward.py).

For products that no model in memory is: what was quantized tensor by tensor, or merged and rounded again. Beside the embeddings and the
head, one layer of the model is in memory at a time.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from .. import checkpoint, forward
from ..nvfp4 import shards
from ..nvfp4.config import auto_class_of
from ..nvfp4.headers import TensorInfo
from ..nvfp4.linear import PACKED, NVFP4Linear
from .quantize_jobs import read_tensor


def record(folder: Path, device: torch.device | str = "cpu") -> bool:
    """Write what the NVFP4 model in `folder`, an unfinished export with its config.json, computes on the fixed prompt.

    Returns whether it was written: not where a forward takes too long ([`forward.is_quick`]), nor where the model has other names in memory
    than in its folder.

    Raises:
        `ValueError`: what comes out is not finite.
    """
    device, tensors = torch.device(device), shards.read_folder(folder)
    model = _skeleton(folder, tensors)
    if not {name for name, _ in model.named_parameters()} <= tensors.keys() or not forward.is_quick(model, device):
        return False
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len, default=nn.ModuleList())
    inside = set(layers.parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        if parameter not in inside:
            _put(model, parameter, _read(tensors[name], parameter, device))
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    for layer in layers:
        _only_while_it_runs(layer, {p: tensors[names[p]] for p in layer.parameters()}, device)
    checkpoint.write_json_atomically(folder / forward.FORWARD_NAME, forward.measure(model, device=device))
    return True


def _skeleton(folder: Path, tensors: dict[str, TensorInfo]) -> PreTrainedModel:
    """The model without its weights: parameters on the meta device, buffers computed."""
    config = AutoConfig.from_pretrained(folder)
    dtype = config.dtype or torch.bfloat16
    del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = auto_class_of(config).from_config(config, dtype=dtype)
        for name, module in list(model.named_modules()):
            if f"{name}.{PACKED[0]}" in tensors:
                size, bias = (module.in_features, module.out_features), module.bias is not None
                model.set_submodule(name, NVFP4Linear(*size, bias=bias, device="meta", compute_dtype=dtype))
    model.tie_weights()
    return model


def _read(info: TensorInfo, like: torch.Tensor, device: torch.device) -> nn.Parameter:
    tensor = read_tensor(info, str(device))
    tensor = tensor.to(like.dtype) if like.is_floating_point() else tensor.reshape(-1).view(like.dtype).view(like.shape)
    return nn.Parameter(tensor, requires_grad=False)


def _put(module: nn.Module, old: torch.Tensor, new: nn.Parameter) -> None:
    """`new` in every place of `old`: tied ones have several."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[name] = new


def _only_while_it_runs(layer: nn.Module, stored: dict[nn.Parameter, TensorInfo], device: torch.device) -> None:
    """Has `layer` read its parameters before it is called, and forget them after."""
    read: list[tuple[nn.Parameter, nn.Parameter]] = []

    def before(*_: Any) -> None:
        for empty, info in stored.items():
            read.append((empty, _read(info, empty, device)))
            _put(layer, *read[-1])

    def after(*_: Any) -> None:
        while read:
            empty, full = read.pop()
            _put(layer, full, empty)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)
