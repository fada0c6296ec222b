"""What an update changes, and how it gets from the trainer's model into an engine: an adapter, or every weight."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch
from accelerate.utils import is_peft_model
from peft import PeftModel
from torch import nn

from ..noise.hooks import NoiseDraw
from ..support.names import canonical_name, full_tensor, full_tensors, local_tensor
from .adapter import active_adapter, check_servable, rollout_layers, trained_norms
from .engine import Engine, RolloutError
from .sums import bits
from .wire import AdapterTensors, Update, changes, fingerprint, not_finite

#: makes the whole tensors of sharded parameters available while it is open
Gather = Callable[[list[torch.Tensor]], AbstractContextManager]


class Trained(ABC):
    """The trained part of a model. Found once, at start: wrappers such as DDP and FSDP come later and keep the modules."""

    @abstractmethod
    def parameters(self) -> list[torch.Tensor]:
        """All of it, as it is now."""

    @abstractmethod
    def put(
        self, engine: Engine, gather: Gather, noisy: Sequence[str] = (), draw: NoiseDraw | None = None
    ) -> tuple[str, float | None]:
        """Copy it into the engine, and put the noise of `draw` on its norms `noisy`, where there is a draw; as `Engine.put`. Collective where
        parameters are sharded.

        Returns:
            Fingerprint of what was put, and what `Engine.put` gave.

        Raises:
            [`RolloutError`]: it holds values that are not finite.
        """

    @abstractmethod
    def fingerprint(self, parameters: Sequence[torch.Tensor]) -> str:
        """What `put` gives of `parameters`, whole ones; with nothing made of them, which takes longer than to read them."""

    def whole(self) -> bool:
        """Whether this process holds all of it; `stamp` is the fingerprint that `put` gives then."""
        return _whole(self.parameters())

    def stamp(self) -> str:
        """Another one after a change of what this process holds, however it was made: an update, a load, a copy into it. By sums of each tensor
        (sums.py), which may stay as they are where values only change places within one tensor."""
        parameters = self.parameters()
        return self.fingerprint(parameters) if _whole(parameters) else changes(map(local_tensor, parameters))


class TrainedAdapter(Trained):
    """The active LoRA adapter of a PEFT model, and the norms in its `modules_to_save`.

    Raises:
        `ValueError`: an adapter that no engine of ours computes.
    """

    def __init__(self, model: nn.Module) -> None:
        check_servable(model)
        self.name = active_adapter(model)
        self.layers = {
            name: (layer, cast(nn.Linear, layer.lora_A[self.name]), cast(nn.Linear, layer.lora_B[self.name]))
            for name, layer in rollout_layers(model).items()
        }
        self.norms = cast(dict[str, nn.RMSNorm], trained_norms(model))
        self._check_complete(model)

    def _check_complete(self, model: nn.Module) -> None:
        """Whatever is trained has to be among what is put."""
        mine, others = {id(p) for p in self.parameters()}, set(cast(PeftModel, model).peft_config) - {self.name}
        left = [
            n
            for n, p in model.named_parameters()
            if p.requires_grad and id(p) not in mine and not others & {*n.split(".")}
        ]
        if left:
            layers = sorted({canonical_name(name.partition(".lora_")[0]) for name in left})
            raise ValueError(
                f"{len(left)} trained tensors would never reach vLLM, which carries LoRA on linear layers and norms in modules_to_save: those of "
                f"{', '.join(layers[:4])}. Take them out of target_modules, or use use_vllm=False."
            )

    def parameters(self) -> list[torch.Tensor]:
        modules: list[nn.Linear | nn.RMSNorm] = [half for _, down, up in self.layers.values() for half in (down, up)]
        # twice in a step, of hundreds: by the module's own dict, which is faster than by its attribute
        return [cast(torch.Tensor, module._parameters["weight"]) for module in [*modules, *self.norms.values()]]

    def put(
        self, engine: Engine, gather: Gather, noisy: Sequence[str] = (), draw: NoiseDraw | None = None
    ) -> tuple[str, float | None]:
        parameters = self.parameters()
        with gather(parameters):
            update = self._update(full_tensors(parameters))
            effective = engine.put(update, noisy, draw)
            return update.fingerprint, effective

    def fingerprint(self, parameters: Sequence[torch.Tensor]) -> str:
        return self._update(parameters).fingerprint

    def _update(self, parameters: Sequence[torch.Tensor]) -> Update:
        following = iter(parameters)
        adapter = {
            name: AdapterTensors(next(following), next(following), layer.scaling[self.name])
            for name, (layer, _, _) in self.layers.items()
        }
        return Update(adapter, {name: next(following) for name in self.norms})


class TrainedWeights(Trained):
    """Every trainable weight of a model without an adapter (`base_format="full"`), tied ones once."""

    def __init__(self, model: nn.Module) -> None:
        self.places: list[tuple[str, nn.Module, str]] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self.places.append((canonical_name(f"{prefix}.{key}" if prefix else key), module, key))

    def parameters(self) -> list[torch.Tensor]:
        return [getattr(module, key) for _, module, key in self.places]

    def put(
        self, engine: Engine, gather: Gather, noisy: Sequence[str] = (), draw: NoiseDraw | None = None
    ) -> tuple[str, float | None]:
        sums: list[tuple[str, torch.Tensor]] = []

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, module, key in self.places:
                parameter = getattr(module, key)
                with gather([parameter]):
                    whole = full_tensor(parameter)
                    sums.append((name, bits(whole)))
                    yield name, whole

        self._check_finite()  # all of them, before the first is copied
        engine.put_weights(stream())
        return fingerprint(sums), engine.put(None, noisy, draw)

    def fingerprint(self, parameters: Sequence[torch.Tensor]) -> str:
        return fingerprint((name, parameter) for (name, _, _), parameter in zip(self.places, parameters, strict=True))

    def _check_finite(self) -> None:
        parts = [
            (name, part) for name, module, key in self.places if (part := local_tensor(getattr(module, key))).numel()
        ]
        bad = not_finite(parts)
        if bad:
            raise RolloutError(
                f"The trained weights hold NaN or infinity in {len(bad)} of {len(parts)} tensors ({', '.join(bad[:3])}). Lower learning_rate or "
                "max_grad_norm, and resume from an earlier checkpoint."
            )


def _whole(parameters: Sequence[torch.Tensor]) -> bool:
    return all(type(parameter) is nn.Parameter for parameter in parameters)


def trained_part(model: nn.Module) -> Trained:
    return TrainedAdapter(model) if is_peft_model(model) else TrainedWeights(model)
