"""What a model computes on a fixed prompt: recorded beside it when it is exported, compared when it is loaded whole.

The bytes of a folder may be those that were sealed, and still be read as another model: by a release that maps names or positions in another
way, or because the export wrote something else than the policy that was trained.

Compared are the log-probabilities of fixed tokens, by the root of their mean squared difference, in units of how much log-probabilities
vary over the vocabulary. On random models of 26 to 32 layers, on a CPU, bfloat16 is 0.02 to 0.04 of that away from float32 (0.26 with weights
four times as large); with layers swapped, k and v swapped, gate and up swapped or no MLP it is 1.1 and more. Above `TOLERANCE` it is another
model. A small fine-tuning is not told apart.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from . import checkpoint, report
from .evaluation_mode import evaluation_mode
from .folders import beside, reads_for_its_machine
from .names import is_sharded
from .nvfp4.linear import NVFP4Linear, decoded_weights, has_nvfp4

if TYPE_CHECKING:
    from peft import PeftModel

FORWARD_NAME = "qerl_forward.json"
TOLERANCE = 0.4
_TOKENS = 32
#: packed weights whose forward on a CPU, which decodes each, takes some ten seconds; of more it is neither recorded nor compared there
_MOST_ON_A_CPU = 10**9


class Forward(TypedDict):
    """`logps`: of each token but the first, given those before it. `spread`: their standard deviation over the vocabulary."""

    model_class: str
    packed: bool  # whether the weights are stored in NVFP4
    tokens: list[int]
    logps: list[float]
    spread: float
    computed_with: dict[str, str]


@torch.no_grad()
def measure(
    model: "PreTrainedModel | PeftModel", tokens: list[int] | None = None, device: torch.device | None = None
) -> Forward:
    """Compute on the fixed prompt, in evaluation mode. `device`: where the model computes; default: where it is.

    Raises:
        `ValueError`: what comes out is not finite.
    """
    inner = model if isinstance(model, PreTrainedModel) else cast(PreTrainedModel, model.get_base_model())
    if tokens is None:
        vocabulary = cast(torch.Tensor, inner.get_input_embeddings().weight).shape[0]
        tokens = [7919 * (place + 1) % vocabulary for place in range(_TOKENS)]
    with evaluation_mode(model), decoded_weights(model):
        logits = (
            model(input_ids=torch.tensor([tokens], device=device or inner.device), use_cache=False).logits[0].float()
        )
    logps = logits.log_softmax(-1)
    chosen = logps[:-1].gather(1, torch.tensor(tokens[1:], device=logps.device)[:, None])[:, 0]
    spread = logps.std(-1).mean().item()
    if not math.isfinite(spread):
        raise ValueError(
            f"{type(inner).__name__} computes NaN or infinity in {inner.dtype} although its weights are finite: it overflows. Use bfloat16 or "
            "float32, or take a model that has not diverged."
        )
    return {
        "model_class": type(inner).__name__,
        "packed": has_nvfp4(inner),
        "tokens": tokens,
        "logps": [round(value, 4) for value in chosen.tolist()],
        "spread": spread,
        "computed_with": {**report.versions(), "dtype": str(inner.dtype).removeprefix("torch.")},
    }


def is_quick(model: nn.Module, device: torch.device) -> bool:
    """Whether a forward there takes seconds: everything but a large packed model on a CPU."""
    packed = (module for module in model.modules() if isinstance(module, NVFP4Linear))
    return device.type != "cpu" or sum(layer.in_features * layer.out_features for layer in packed) <= _MOST_ON_A_CPU


def difference(then: Forward, now: Forward) -> float:
    """Root mean squared difference of the log-probabilities, in units of their spread."""
    squares = [(a - b) ** 2 for a, b in zip(then["logps"], now["logps"], strict=True)]
    return math.sqrt(sum(squares) / len(squares)) / then["spread"]


def record(folder: Path, model: "PreTrainedModel | PeftModel", with_adapter: bool = True) -> None:
    """Write what `model` computes into an unfinished export: merged with its adapter, or its base without."""
    with nullcontext() if with_adapter else _without_adapter(model):
        found = measure(model)
    found["packed"] = found["packed"] and not with_adapter
    checkpoint.write_json_atomically(folder / FORWARD_NAME, found)


def compare(model: PreTrainedModel) -> None:
    """Compare a model, just loaded in the format and the class in which it is stored, with what it computed when its folder was sealed, if
    that was recorded.

    Raises:
        `ValueError`: it computes something else.
    """
    manifest = beside(model.config, checkpoint.MANIFEST_NAME)
    if manifest is None or FORWARD_NAME not in checkpoint.sealed_files(manifest.parent):
        return
    recorded, folder = beside(model.config, FORWARD_NAME), model.config.name_or_path
    if recorded is None:
        return
    then: Forward = json.loads(recorded.read_text())
    quantizer = getattr(model, "hf_quantizer", None)
    loaded_as_stored = has_nvfp4(model) if then["packed"] else quantizer is None
    if then["model_class"] != type(model).__name__ or not loaded_as_stored or not is_quick(model, model.device):
        return
    now = measure(model, then["tokens"])
    found = difference(then, now)
    if not found <= TOLERANCE:
        raise ValueError(
            f"{folder} computes something else than when it was exported: on a fixed prompt its log-probabilities are {found:.2f} of their spread "
            f"away (up to {TOLERANCE} is rounding). It was computed with {_listed(then)}, now with {_listed(now)}. Load it with those releases, or "
            f"export it again; without {checkpoint.MANIFEST_NAME} it is loaded as it is."
        )


def compare_base(model: "PreTrainedModel | PeftModel") -> None:
    """As [`compare`], of a packed base without its adapter, in the process of a machine that has it whole. A dense model may have been trained
    since it was loaded.
    """
    base = model if isinstance(model, PreTrainedModel) else cast(PreTrainedModel, model.get_base_model())
    elsewhere = any(parameter.is_meta for parameter in base.parameters()) or is_sharded(base)
    if not has_nvfp4(base) or elsewhere or not reads_for_its_machine():
        return
    with _without_adapter(model):
        compare(base)


@contextmanager
def _without_adapter(model: "PreTrainedModel | PeftModel") -> Iterator[None]:
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        with nullcontext() if isinstance(model, PreTrainedModel) else model.disable_adapter():
            yield
    finally:  # where an adapter is put back, PEFT lets all of it be trained
        for parameter, was in trained.items():
            parameter.requires_grad_(was)


def _listed(forward: Forward) -> str:
    return ", ".join(f"{name} {version}" for name, version in forward["computed_with"].items())
