"""From the names of vLLM's layers back to the names that the same layers have in transformers.

vLLM fuses layers (`packed_modules_mapping`: qkv_proj is q_proj, k_proj, v_proj; newer classes say the same in `hf_to_vllm_mapper`, as
`orig_to_new_stacked`) and some of its classes rename modules (`hf_to_vllm_mapper`: model.language_model.layers becomes
language_model.model.layers). Ignore lists, adapters and the
trainer's modules go by transformers' names, so names are translated once, here, in that direction. Translating the entries
of an ignore list the other way cannot work: an entry may be a pattern.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

#: what nearly every class of transformers calls the model below its head
_BASE_PREFIX = "model."


class Mapper(Protocol):
    """The part of vLLM's `WeightsMapper` that is used: renaming rules, each from a checkpoint's spelling to vLLM's."""

    @property
    def orig_to_new_prefix(self) -> Mapping[str, str | None]: ...
    @property
    def orig_to_new_substr(self) -> Mapping[str, str | None]: ...
    @property
    def orig_to_new_suffix(self) -> Mapping[str, str | None]: ...

    def apply_list(self, values: list[str]) -> list[str]: ...


@dataclass
class Renaming:
    """How one engine names its layers: the mappers of its model classes, outermost first."""

    mappers: list[Mapper] = field(default_factory=list)

    def add(self, mapper: Mapper) -> None:
        if all(known is not mapper and known != mapper for known in self.mappers):
            self.mappers.append(mapper)

    def original(self, name: str, known: Collection[str] = ()) -> str:
        """The name in transformers of vLLM's layer `name`.

        Args:
            known: names that exist there. Where it is given it decides between spellings that vLLM reads alike.

        Raises:
            `ValueError`: no spelling that its rules can be turned back to gives this name.
        """
        for mapper in reversed(self.mappers):
            spellings = list(_spellings(name, mapper))
            if not spellings:
                raise ValueError(
                    f"vLLM's class renames modules in a way that cannot be turned back for its layer {name!r}, so it is not known "
                    "which layer of the checkpoint that is. Use use_vllm=False for this architecture."
                )
            name = next((spelling for spelling in spellings if spelling in known), spellings[0])
        return name


def _spellings(name: str, mapper: Mapper) -> Iterator[str]:
    """Names whose weight `mapper` translates to the weight of vLLM's layer `name`, the likeliest first.

    Where rules replace a prefix, several spellings may be read alike. vLLM's classes list the names of transformers 5 first and those
    of older checkpoints after them; a name that begins with "model." already is the name of a text model, which needs no rule.
    """
    weight = f"{name}.weight"
    renamed = [
        old + weight.removeprefix(new)
        for old, new in mapper.orig_to_new_prefix.items()
        if new is not None and weight.startswith(new)
    ]
    for whole in [weight, *renamed] if weight.startswith(_BASE_PREFIX) else [*renamed, weight]:
        for spelling in [*_with_parts(whole, mapper), whole]:
            if spelling.endswith(".weight") and mapper.apply_list([spelling]) == [weight]:
                yield spelling.removesuffix(".weight")


def _with_parts(weight: str, mapper: Mapper) -> Iterator[str]:
    """`weight` with one rule for a part of the name turned back."""
    for old, new in mapper.orig_to_new_substr.items():
        if new and new.strip(".") and new in weight:
            yield weight.replace(new, old, 1)
    for old, new in mapper.orig_to_new_suffix.items():
        if new and weight.endswith(new):
            yield weight.removesuffix(new) + old


def split_fused(name: str, packed_modules_mapping: Mapping[str, Sequence[str]]) -> list[str]:
    """The layers that vLLM's layer `name` fuses, in row order; itself, where it fuses none."""
    parent, _, leaf = name.rpartition(".")
    shards = packed_modules_mapping.get(leaf, [leaf])
    return [f"{parent}.{shard}" if parent else shard for shard in shards]


def stacked(mapper: Any) -> dict[str, list[str]]:
    """What a class of vLLM says of fused layers in its `hf_to_vllm_mapper`, in the form of a `packed_modules_mapping`."""
    fused: dict[str, list[str]] = {}
    for part, (whole, _) in (getattr(mapper, "orig_to_new_stacked", None) or {}).items():
        part, whole = part.strip("."), whole.strip(".")
        if "." not in part and "." not in whole:
            fused.setdefault(whole, []).append(part)
    return fused


def with_gap(name: str, known: Collection[str]) -> str:
    """`name`, or where it is not known the one known name that has further parts before its last: Falcon-H1's layers in vLLM call
    `layers.0.self_attn.q_proj` `layers.0.q_proj`. Layers are named to their weights by it, which the probe at start compares."""
    if not known or name in known:
        return name
    parent, _, leaf = name.rpartition(".")
    longer = [other for other in known if parent and other.startswith(f"{parent}.") and other.endswith(f".{leaf}")]
    return longer[0] if len(longer) == 1 else name
