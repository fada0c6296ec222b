"""Regional torch.compile: one compiled function shared by all decoder layers of the trainer's model.

Half of an update in eager mode is not arithmetic: casts, additions and copies around LoRA, norms, rotary embedding and
SwiGLU, each a kernel over the whole activation. Inductor fuses them, forward and backward. Compilation is per layer, as
all layers are alike: one compilation serves all, and hidden-state hooks and FSDP 2 stay outside, around it.

    layer(...)  ->  _Forward  ->  the compiled function      training mode, no key/value cache
                              ->  the layer's own forward    generation, evaluation, after a failure (logged once)

- **Lengths.** Batch and sequence dimensions are symbolic from the first call, so a new length compiles nothing.
- **Recomputation inside.** A layer with checkpointing (`CompiledLayers.recompute`) recomputes within its backward
  function, and only the needs of the gradients (`layer_function.py`).
- **One graph for all passes.** A forward without gradient (old log-probabilities) runs the update's graph and drops its
  saved tensors, so both give the same bits, as in eager mode, at half the compilation.
- **Gated delta nets** stay eager next to compiled attention layers: transformers' code for them loops over the chunks
  of a sequence, minutes of compilation per length, and flash-linear-attention's kernels are opaque to the compiler.
- **Noise** (`noise/hooks.py`) is added to the norms' weights around the compiled function, which gets them as inputs.
- **Reproducible.** No kernel is chosen by timing (`layer_function.py`), and the shapes in `warm_up` depend on the
  settings alone, so a resumed run gives the same bits as an uninterrupted one.

torch's global state is unchanged; other compiled code in the process (vLLM's) has its own functions and limits.
"""

import hashlib
import inspect
import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch._dynamo  # not loaded by `import torch`
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils.checkpoint import checkpoint
from transformers import TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from ..noise.hooks import laid_on
from ..nvfp4.architectures import delta_net_layers
from ..support.trl import OnlineTrainer
from . import attention
from .layer_function import FAILURES, LayerFunction, base_of, decoder_layers, decoder_of, tensors
from .packing import Packing

logger = logging.getLogger(__name__)

#: arguments with a cache of keys, values or states
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
#: tokens per sequence of the warm-up, at most
_LONGEST = 1024


class CompiledLayers:
    """A model's compiled layers.

    Args:
        layers: decoder layers, in forward order.
        left: indices of layers that stay eager.
        norm: the norm after them, or None.
        backend: of torch.compile.
        deterministic: False lets inductor choose kernels by timing them.
    """

    def __init__(
        self,
        layers: list[nn.Module],
        norm: nn.Module | None,
        backend: str = "inductor",
        deterministic: bool = True,
        left: Container[int] = (),
    ) -> None:
        self.layers, self.norm = layers, norm
        self.rehearsing: str | None = None  # "clean" or "noisy" in `warm_up`
        # whether the latest layer did: the final norm has no argument that distinguishes generation from an update
        self.ran_compiled = False
        functions: dict[Callable, LayerFunction] = {}
        self.forwards: list[_Forward] = []
        for index, module in enumerate((*layers, *([norm] if norm is not None else []))):
            own = _without_checkpoint(type(module).forward)
            if own not in functions:
                functions[own] = LayerFunction(own, backend, deterministic)
            self.forwards.append(_Forward(self, module, functions[own], left=index in left))
            module.forward = self.forwards[-1]

    @property
    def failed(self) -> bool:
        """Whether all layers have fallen back to eager mode."""
        return all(forward.function.failed for forward in self.forwards if not forward.is_norm)

    def give_up(self, reason: str) -> None:
        """Fall back to eager mode for all layers."""
        for forward in self.forwards:
            if not forward.function.failed:
                forward.function.give_up(forward.module, reason)

    def recompute(self, layers: Iterable[nn.Module]) -> None:
        """Checkpoint exactly these layers, compiled or not: they keep only their input for the backward pass. With
        transformers' switch on (`layer.gradient_checkpointing`), nothing is recomputed inside."""
        wanted = {id(layer) for layer in layers}
        for forward in self.forwards:
            forward.recomputes = id(forward.module) in wanted

    def remove(self) -> None:
        """Restore the layers' own forward."""
        for forward in self.forwards:
            if vars(forward.module).get("forward") is forward:
                del forward.module.forward

    @contextmanager
    def rehearsal(self, noisy: bool) -> Iterator[None]:
        """Context manager in which each layer also computes its gradients, and drops them."""
        self.rehearsing = "noisy" if noisy else "clean"
        try:
            yield
        finally:
            self.rehearsing = None


def _without_checkpoint(forward: Callable) -> Callable:
    """Return a layer class's forward without the checkpoint of newer transformers, which must not be compiled."""
    checkpoint_of = GradientCheckpointingLayer.__module__
    return inspect.unwrap(forward, stop=lambda each: each.__globals__["__name__"] != checkpoint_of)


class _Forward:
    """Runs a module's compiled function or its own forward. Copies and pickles get the latter."""

    def __init__(self, owner: CompiledLayers, module: nn.Module, function: LayerFunction, left: bool) -> None:
        self.owner, self.module, self.function, self.left = owner, module, function, left
        self.own = type(module).forward
        self.checkpoints = self.own is not function.eager  # if transformers' switch is on
        self.is_norm = module is owner.norm
        self.recomputes = False
        self.parts = [part for part in module.modules() if not any(part.children())]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around = not self.is_norm and self.module.gradient_checkpointing
        if around and self.checkpoints and self.module.training:
            if _with_cache(kwargs):  # removed by transformers' own checkpoint
                return type(self.module).forward(self.module, *args, **kwargs)
            return self._around(args, kwargs)
        if around or not self.recomputes or not self.module.training or _with_cache(kwargs):
            return self._run(False, *args, **kwargs)
        if self.function.recomputes and self._compiles(kwargs):
            return self._run(True, *args, **kwargs)
        return self._around(args, kwargs)

    def _around(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Recompute the whole layer."""
        checkpointed = getattr(self.module, "_gradient_checkpointing_func", partial(checkpoint, use_reentrant=False))
        return checkpointed(partial(self._run, False, **kwargs), *args)

    def _run(self, recompute: bool, *args: Any, **kwargs: Any) -> Any:
        if not self._compiles(kwargs):
            self.owner.ran_compiled = False
            return self.function.eager(self.module, *args, **kwargs)
        name = None if args else next(iter(kwargs))
        hidden = args[0] if name is None else kwargs[name]
        graded = torch.is_grad_enabled()
        if not (graded and hidden.requires_grad):  # one graph, with or without a gradient
            hidden = hidden.detach().requires_grad_()
        given = ((hidden, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: hidden})
        try:
            with torch.enable_grad(), laid_on(self.parts, self.owner.rehearsing == "noisy") as laid:
                if not laid:
                    if recompute:
                        return self._around(args, kwargs)
                    return self.function.eager(self.module, *args, **kwargs)
                _mark_dynamic(given)
                output = self.function(self.module, recompute, *given[0], **given[1])
                if self.owner.rehearsing:
                    self._drop_gradients(output, hidden)
        except FAILURES as error:
            self.function.give_up(self.module, _said(error), recompute)
            return self(*args, **kwargs) if recompute else self._run(False, *args, **kwargs)
        self.owner.ran_compiled = True
        return output if graded else _detached(output)

    def _compiles(self, kwargs: Mapping[str, Any]) -> bool:
        if self.left or self.function.failed or not self.module.training or torch.is_inference_mode_enabled():
            return False
        if torch.compiler.is_compiling():  # the user compiles the whole model
            return False
        if self.is_norm:
            return self.owner.ran_compiled
        return not _with_cache(kwargs)

    def _drop_gradients(self, output: Any, hidden: torch.Tensor) -> None:
        outputs = [part for part in tensors(output) if part.requires_grad]
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        ones = [torch.ones_like(part) for part in outputs]
        torch.autograd.grad(outputs, [hidden, *trained], ones, allow_unused=True)

    def __deepcopy__(self, memo: dict) -> Any:
        copied = memo.get(id(self.module))
        return self if copied is None else MethodType(self.own, copied)

    def __reduce__(self) -> tuple:
        return _bound, (self.own, self.module)


def _with_cache(kwargs: Mapping[str, Any]) -> bool:
    return bool(kwargs.get("use_cache")) or any(kwargs.get(name) is not None for name in _CACHES)


def _bound(function: Callable, module: nn.Module) -> MethodType:
    return MethodType(function, module)  # no pickle finds the type itself


def _said(error: Exception) -> str:
    """Return the type of an error and its first words: the compiler's messages have pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return tuple(map(_detached, value)) if isinstance(value, tuple) else value


def _mark_dynamic(arguments: Any) -> None:
    """Mark batch and sequence dimensions of layer inputs: (B, S, ...) activations and rotary tables, (B, 1, S, S)
    masks, (B, S) or (3, B, S) positions, (n,) sequence boundaries. A dimension of 1 stays 1."""
    for tensor in tensors(arguments):
        if tensor.ndim == 4:
            dims: tuple[int, ...] = (0, 2, 3)
        elif tensor.ndim == 3 and not tensor.is_floating_point():
            dims = (1, 2)
        else:
            dims = (0, 1)[: tensor.ndim]
        for dim in dims:
            if tensor.shape[dim] != 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)


def why_not(model: nn.Module) -> str | None:
    """Return why the layers of a causal language model, bare or in PEFT, cannot be compiled one by one, or None."""
    layers = decoder_layers(model)
    if not layers:
        return f"{type(decoder_of(model)).__name__} has no list of layers of the kind that transformers checkpoints"
    taken = [type(layer).__name__ for layer in layers if "forward" in vars(layer)]
    return f"the forward of {taken[0]} is replaced already (is the model on several devices?)" if taken else None


def compile_layers(model: nn.Module, backend: str = "inductor", deterministic: bool = True) -> CompiledLayers:
    """Compile the text decoder layers of `model` and the final norm for training, at the first call."""
    named = [child for name, child in decoder_of(model).named_children() if "norm" in name.lower()]
    norms = [child for child in named if not any(child.children()) and "forward" not in vars(child)]
    left = delta_net_layers(base_of(model).config)
    return CompiledLayers([*decoder_layers(model)], norms[0] if len(norms) == 1 else None, backend, deterministic, left)


def reason_against(trainer: OnlineTrainer) -> str | None:
    """Return why this run's layers are not compiled, or None. `compile_layers=True` compiles on any device."""
    if trainer.args.torch_compile:
        return "torch_compile=True compiles the whole model"
    plugin = trainer.accelerator.state.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        return "DeepSpeed ZeRO-3 gathers weights inside of layers"
    device = trainer.args.device.type
    if device != "cuda" and not trainer.args.compile_layers:
        return f"compiling pays off on a CUDA device only, and this is {device}"
    return why_not(trainer.accelerator.unwrap_model(trainer.model))


def warm_up(
    compiled: CompiledLayers,
    model: nn.Module,
    batch: int,
    length: int,
    noisy: bool = False,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    packed: Packing | None = None,
) -> None:
    """Compile now: run each layer's forward and backward on `batch` sequences of up to `length` tokens, one padded.

    Gradients, random states and training flags are unchanged. If each length needs a new graph, the layers fall back to
    eager mode. One process compiles at a time; the others find its code in inductor's cache.

    Args:
        noisy: also compile for noise on the norms in training.
        autocast: makes the autocast context of training.
        packed: the run's packing; if it is on, the sequences come as one row.
    """
    base = base_of(model)
    device = next(base.get_input_embeddings().parameters()).device
    devices = [device.index or torch.cuda.current_device()] if device.type == "cuda" else []
    flags = {module: module.training for module in model.modules()}
    in_rows = packed is not None and packed.on
    inputs = packed.examples(batch, length) if packed is not None and in_rows else _padded(batch, length, device)
    # inductor's cache is per device index: only processes with the same index wait for each other
    same = f"{base.config.to_json_string()} {device} {batch} {length} {noisy} {in_rows}"
    turn = _taking_turns(same, f"the layers of {type(base).__name__} for updates on {device}")
    try:
        model.train()
        with turn, torch.random.fork_rng(devices=devices), torch.no_grad(), autocast():
            for kind in (False, True) if noisy else (False,):
                graphs: list[int] = []
                for given in inputs:
                    with compiled.rehearsal(kind), attention.packed_call() if in_rows else nullcontext():
                        decoder_of(model)(**given, use_cache=False)
                    graphs.append(counters["stats"]["unique_graphs"])
                if graphs[-1] - graphs[-3] >= 2:
                    compiled.give_up("each sequence length needs its own compilation")
    finally:
        for module, flag in flags.items():
            module.training = flag


def _taking_turns(same: str, what: str) -> AbstractContextManager:
    """Let processes with the same compilation compile one by one; all at once if our kernels cannot be imported."""
    try:
        from qerl_nvfp4.turns import one_process_at_a_time
    except ImportError:  # reported by nvfp4/linear.py
        return nullcontext()
    name = f"qerl-update-{hashlib.blake2b(same.encode(), digest_size=8).hexdigest()}"
    return one_process_at_a_time(cache_dir(), name, what, partial(print, flush=True))


def _padded(batch: int, length: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Make inputs of a decoder for each graph: mask sizes not divisible by 16 may need another graph."""
    made, half = [], max(32, length // 32 * 16)
    for tokens in (max(32, length // 16 * 16), max(32, length // 16 * 16) - 8, half, half - 8):
        ids = torch.ones(batch, tokens, dtype=torch.long, device=device)
        mask = torch.ones_like(ids)
        mask[0, : 2 if batch > 1 else 0] = 0
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


class WarmUp(TrainerCallback):
    """Callback that compiles the layers when training starts, and prints one line."""

    def __init__(self, trainer: OnlineTrainer, compiled: CompiledLayers) -> None:
        self._trainer, self._compiled, self._done = trainer, compiled, False

    def on_train_begin(self, args, state, control, **kwargs):
        if self._done:
            return
        self._done, started, took = True, time.perf_counter(), "in the first step"
        trainer, compiled = self._trainer, self._compiled
        if not trainer.is_fsdp_enabled:  # its root gathers parameters outside of layers, in its own forward
            model, plan = trainer.accelerator.unwrap_model(trainer.model), trainer.memory_plan
            length = min((plan.max_model_len if plan is not None else None) or _LONGEST, _LONGEST)
            noisy, autocast = args.aqn and args.aqn_scope == "policy", trainer.accelerator.autocast
            try:
                packing = vars(trainer).get("_packing")
                warm_up(compiled, model, args.per_device_train_batch_size, length, noisy, autocast, packing)
            except RuntimeError as error:  # from a kernel, or out of memory
                compiled.give_up(_said(error))
            if args.device.type == "cuda":
                torch.cuda.empty_cache()  # other lengths can hardly reuse these blocks
            took = f"{time.perf_counter() - started:.1f} s"
        if not compiled.failed and state.is_world_process_zero:
            name, left = type(compiled.layers[0]).__name__, sum(forward.left for forward in compiled.forwards)
            name += f" ({left} gated delta nets stay uncompiled)" if left else ""
            print(
                f"torch.compile of {len(compiled.layers) - left} {name} for updates of any length: {took}", flush=True
            )


def compile_for(trainer: OnlineTrainer) -> CompiledLayers | None:
    """Compile the layers of a trainer's model according to its `compile_layers`.

    Raises:
        ValueError: `compile_layers=True` in an unsupported run.
    """
    wanted = trainer.args.compile_layers
    if wanted is False:
        return None
    if (reason := reason_against(trainer)) is not None:
        if wanted:
            raise ValueError(f"compile_layers=True cannot work here: {reason}. Leave compile_layers out.")
        logger.info("The layers run without torch.compile, so training steps take longer: %s.", reason)
        return None
    compiled = compile_layers(trainer.accelerator.unwrap_model(trainer.model))
    trainer.add_callback(WarmUp(trainer, compiled))
    return compiled
