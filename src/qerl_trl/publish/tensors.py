"""How each tensor of an export is made when its turn to be written comes: cast, packed as it is, or rounded to NVFP4 again."""

from collections.abc import Iterator
from typing import cast

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from ..nvfp4.architectures import DECODER
from ..nvfp4.format import dequantize, largest_magnitude, power_of_two_global_scale, quantize
from ..nvfp4.layouts import TensorSpec, packed_specs
from ..nvfp4.linear import NVFP4Linear
from .merge import Entry, dense_weight, nvfp4_layer
from .records import RequantizedNote, Survived
from .writer import Job


def cast_job(entry: Entry, dtype: torch.dtype) -> Job:
    dtype = dtype if entry.dtype.is_floating_point else entry.dtype
    return Job((TensorSpec(entry.name, dtype, entry.shape),), lambda: [entry.value().to(dtype)])


def merged_job(entry: Entry, dtype: torch.dtype) -> Job:
    """As [`cast_job`], with a note of how much of the adapter's change of a layer the rounding to `dtype` keeps."""
    job = cast_job(entry, dtype)
    if not isinstance(entry.layer, LoraLinear) or dtype == torch.float32:
        return job
    note: RequantizedNote = {"layers": [entry.name]}

    def make() -> list[torch.Tensor]:
        merged = entry.value()
        written = merged.to(dtype)
        _compare(note, written.float(), merged, dense_weight(cast(nn.Module, entry.layer)))
        return [written]

    return job._replace(make=make, note=note)


def lossless_dtype(entry: Entry) -> torch.dtype:
    """bfloat16 for a tensor that is only kept in float32 (a run with float32 compute loads a bf16 base so), else its own dtype."""
    if entry.dtype != torch.float32:
        return entry.dtype
    value = entry.value()
    return torch.bfloat16 if torch.equal(value.to(torch.bfloat16).to(torch.float32), value) else torch.float32


def _packed_layer(entry: Entry) -> NVFP4Linear:
    layer = nvfp4_layer(entry)
    assert layer is not None, f"{entry.name} is dense"
    return layer


def packed_job(entry: Entry) -> Job:
    packed, block_scale, global_scale = _packed_layer(entry).nvfp4
    return Job(
        packed_specs(entry.name, *entry.shape),
        lambda: [packed, block_scale.view(torch.float8_e4m3fn), global_scale],
    )


def fused_entries(entries: list[Entry]) -> list[list[Entry]]:
    """Group the entries whose layers vLLM fuses (q/k/v, gate/up): they must share one global scale."""
    groups: dict[tuple[str, int], list[Entry]] = {}
    for position, entry in enumerate(entries):
        parent, _, child = entry.name.removesuffix(".weight").rpartition(".")
        index = next((i for i, group in enumerate(DECODER.groups) if child in group), None)
        groups.setdefault((parent, index) if index is not None else (entry.name, position), []).append(entry)
    return list(groups.values())


def requantize_job(group: list[Entry], scale_rule: str) -> Job:
    note: RequantizedNote = {}

    def make() -> Iterator[torch.Tensor]:
        amax = torch.stack(
            [largest_magnitude(entry.value()) for entry in group]
        ).amax()  # merged twice rather than kept
        shared = power_of_two_global_scale(amax)
        note["layers"] = [entry.name for entry in group]
        for entry in group:
            merged = entry.value()
            packed, block_scale, global_scale = quantize(merged, scale_rule, shared)
            written = dequantize(packed, block_scale, global_scale, torch.float32)
            _compare(note, written, merged, _packed_layer(entry).dequantize(torch.float32))
            yield from (packed, block_scale.view(torch.float8_e4m3fn), global_scale)

    specs = tuple(spec for entry in group for spec in packed_specs(entry.name, *entry.shape))
    return Job(specs, make, note)


def _compare(note: RequantizedNote, written: torch.Tensor, merged: torch.Tensor, base: torch.Tensor) -> None:
    """Add a layer to the sums of `note`. Works in place: all three are copies."""
    written, wanted = written.sub_(base), merged.sub_(base)
    note["kept"] = note.get("kept", 0.0) + _dot(written, wanted)
    note["change"] = note.get("change", 0.0) + _dot(wanted, wanted)
    written.sub_(wanted)
    note["error"] = note.get("error", 0.0) + _dot(written, written)


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a * b).sum(dtype=torch.float64).item()


def survived_of(notes: list[RequantizedNote]) -> Survived:
    change = sum(note["change"] for note in notes)
    if change == 0:
        raise ValueError("The adapter changes no quantized weight (is it untrained?): there is nothing to merge.")
    kept, error = sum(note["kept"] for note in notes), sum(note["error"] for note in notes)
    return {"kept_fraction": kept / change, "error_ratio": (error / change) ** 0.5}
