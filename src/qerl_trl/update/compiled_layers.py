"""Regional torch.compile: the decoder layers of the trainer's model as one compiled function, which all of them share.

Half of an update in eager mode is not arithmetic: casts, additions and copies around LoRA, norms, rotary embedding and SwiGLU, each a kernel
that reads and writes the whole activation. Inductor makes a few of them, forward and backward. A layer at a time, because the layers are
alike: what is compiled for the first serves all, and hidden-state hooks and FSDP 2 stay outside, around it.

    layer(...)  ->  _Forward  ->  the compiled function      training mode, no key/value cache
                              ->  the layer's own forward    generation, evaluation, after a failure (said once)

- **Lengths.** Batch and sequence dimensions are symbolic from the first call on, so a new length compiles nothing.
- **Recomputation inside.** A layer that keeps nothing but its input (`CompiledLayers.recompute`) recomputes within its backward function, and
  there only what the gradients need (`layer_function.py`).
- **One graph for all passes.** A forward without gradient (old log-probabilities) runs the same graph as the update and drops what it saved,
  so both give the same bits, as eager code does, and half is compiled.
- **Gated delta nets** stay as they are, beside layers of attention that are compiled: transformers' own code for them has a loop over the chunks of a
  sequence, of which the compiler would make a graph of minutes for each length, and flash-linear-attention's kernels are none that it can see into.
- **Noise** (`noise/hooks.py`) is laid on the norms' weights around the compiled function; a new draw is new values of the same inputs.
- **Same bits again.** Nothing is chosen by timing (`layer_function.py`), and `warm_up` compiles on shapes that the settings alone decide, so a resumed run
  computes what the uninterrupted one would have.

Nothing of torch's global state is changed; other compiled code in the process (vLLM's) has its own functions and its own limits.
"""

import hashlib
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

#: arguments by which layers get a cache of keys, values or states
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
#: tokens per sequence of the warm-up, at most
_LONGEST = 1024


class CompiledLayers:
    """What `compile_layers` made of a model.

    Args:
        layers: decoder layers, in the order in which they run.
        left: which of them stay as they are.
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
        self.rehearsing: str | None = None  # in `warm_up`: "clean" or "noisy"
        # the latest layer; the norm after the layers has no argument that tells generation from an update
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
        """Whether no layer runs compiled any more."""
        return all(forward.function.failed for forward in self.forwards if not forward.is_norm)

    def give_up(self, reason: str) -> None:
        """Eager mode from here on, for all of them."""
        for forward in self.forwards:
            if not forward.function.failed:
                forward.function.give_up(forward.module, reason)

    def recompute(self, layers: Iterable[nn.Module]) -> None:
        """Let these layers, and no others, keep nothing but their input for the backward pass, compiled or not. Where transformers' switch
        (`layer.gradient_checkpointing`) is on, nothing is recomputed inside."""
        wanted = {id(layer) for layer in layers}
        for forward in self.forwards:
            forward.recomputes = id(forward.module) in wanted

    def remove(self) -> None:
        """Give the layers their own forward back."""
        for forward in self.forwards:
            if vars(forward.module).get("forward") is forward:
                del forward.module.forward

    @contextmanager
    def rehearsal(self, noisy: bool) -> Iterator[None]:
        """Inside, each layer also computes its gradients, and drops them."""
        self.rehearsing = "noisy" if noisy else "clean"
        try:
            yield
        finally:
            self.rehearsing = None


def _without_checkpoint(forward: Callable) -> Callable:
    """A layer class's forward without the checkpoint that newer transformers put around it, which would become part of the compiled function."""
    while getattr(forward, "__globals__", {}).get("__name__") == GradientCheckpointingLayer.__module__:
        if not hasattr(forward, "__wrapped__"):
            break
        forward = forward.__wrapped__
    return forward


class _Forward:
    """Stands before a module's own forward and chooses. Not part of a copy or a pickle: they get the module's own."""

    def __init__(self, owner: CompiledLayers, module: nn.Module, function: LayerFunction, left: bool) -> None:
        self.owner, self.module, self.function, self.left = owner, module, function, left
        self.own = type(module).forward
        self.checkpoints = self.own is not function.eager  # itself, where transformers' switch is on
        self.is_norm = module is owner.norm
        self.recomputes = False
        self.parts = [part for part in module.modules() if not any(part.children())]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        around = getattr(self.module, "gradient_checkpointing", False)
        if around and self.checkpoints and self.module.training:
            if _with_cache(kwargs):  # which transformers' own takes away
                return type(self.module).forward(self.module, *args, **kwargs)
            return self._around(args, kwargs)
        if around or not self.recomputes or not self.module.training or _with_cache(kwargs):
            return self._run(False, *args, **kwargs)
        if self.function.recomputes and self._compiles(kwargs):
            return self._run(True, *args, **kwargs)
        return self._around(args, kwargs)

    def _around(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Recompute all that the layer computes."""
        checkpointed = getattr(self.module, "_gradient_checkpointing_func", partial(checkpoint, use_reentrant=False))
        return checkpointed(partial(self._run, False, **kwargs), *args)

    def _run(self, recompute: bool, *args: Any, **kwargs: Any) -> Any:
        if not self._compiles(kwargs):
            self.owner.ran_compiled = False
            return self.function.eager(self.module, *args, **kwargs)
        name = None if args else next(iter(kwargs))
        hidden = args[0] if name is None else kwargs[name]
        graded = torch.is_grad_enabled()
        if not (graded and hidden.requires_grad):  # one graph, whether or not a gradient is wanted here
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
        if torch.compiler.is_compiling():  # somebody compiles the whole model
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
    """The kind of an error and its first words: the compiler's go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:300]}"


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return tuple(map(_detached, value)) if isinstance(value, tuple) else value


def _mark_dynamic(arguments: Any) -> None:
    """Batch and sequence dimensions of what layers are given: (B, S, ...) activations and rotary tables, (B, 1, S, S) masks, (B, S) or
    (3, B, S) positions, (n,) sequence boundaries. A dimension of 1 stays 1."""
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


# --- which layers -----------------------------------------------------------------------------------------------------------------


def find_layers(model: nn.Module) -> tuple[list[nn.Module], nn.Module | None]:
    """(decoder layers, the norm after them or None) of a causal language model, bare or in PEFT; towers of other modalities are left alone.

    Raises:
        ValueError: there are none that can be told.
    """
    decoder = decoder_of(model)
    layers: list[nn.Module] = [*decoder_layers(model)]
    if not layers:
        raise ValueError(f"{type(decoder).__name__} has no list of layers of the kind that transformers checkpoints")
    taken = [type(layer).__name__ for layer in layers if "forward" in vars(layer)]
    if taken:
        raise ValueError(f"the forward of {taken[0]} was replaced already (a model over several devices?)")
    named = [child for name, child in decoder.named_children() if "norm" in name.lower()]
    norms = [child for child in named if not any(child.children()) and "forward" not in vars(child)]
    return layers, norms[0] if len(norms) == 1 else None


def compile_layers(model: nn.Module, backend: str = "inductor", deterministic: bool = True) -> CompiledLayers:
    """Run the decoder layers of `model`, and the norm after them, compiled when it trains. Nothing is compiled before the first call.

    Raises:
        ValueError: see `find_layers`.
    """
    layers, norm = find_layers(model)
    return CompiledLayers(layers, norm, backend, deterministic, left=delta_net_layers(base_of(model).config))


def reason_against(trainer: OnlineTrainer, insists: bool = False) -> str | None:
    """Why this run's layers are not compiled, where `compile_layers` is left out or (`insists`) True; None where they are."""
    if trainer.args.torch_compile:
        return "torch_compile=True compiles the whole model"
    plugin = trainer.accelerator.state.deepspeed_plugin
    if plugin is not None and plugin.zero_stage == 3:
        return "DeepSpeed ZeRO-3 gathers weights inside of layers"
    device = trainer.args.device.type
    return None if insists or device == "cuda" else f"it pays on a CUDA device, this is {device}"


def expected(trainer: OnlineTrainer) -> bool:
    """Whether [`compile_for`] will compile the layers."""
    wanted = trainer.args.compile_layers
    if wanted is False or reason_against(trainer, bool(wanted)) is not None:
        return False
    try:
        find_layers(trainer.accelerator.unwrap_model(trainer.model))
    except ValueError:
        return False
    return True


# --- the start --------------------------------------------------------------------------------------------------------------------


def warm_up(
    compiled: CompiledLayers,
    model: nn.Module,
    batch: int,
    length: int,
    noisy: bool = False,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    packed: Packing | None = None,
) -> None:
    """Compile, by a forward and a backward of each layer for `batch` sequences of up to `length` tokens, the first of them padded.

    Adds nothing to gradients and leaves random states and training flags as they were. Where each further length makes a further graph, the layers
    run in eager mode from here on. Of several processes one compiles at a time, so that the others find its code in inductor's cache.

    Args:
        noisy: also compile for noise on the norms in training.
        autocast: as in training.
        packed: where it is on, the sequences come as one row, as in training.
    """
    base = base_of(model)
    device = next(base.get_input_embeddings().parameters()).device
    devices = [device.index or torch.cuda.current_device()] if device.type == "cuda" else []
    flags = {module: module.training for module in model.modules()}
    in_rows = packed is not None and packed.on
    inputs = packed.examples(batch, length) if packed is not None and in_rows else _padded(batch, length, device)
    # what inductor keeps on disk is of one device with its index: only processes that call theirs by the same one have anything to wait for
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
                    compiled.give_up("each length of the sequences is compiled anew")
    finally:
        for module, flag in flags.items():
            module.training = flag


def _taking_turns(same: str, what: str) -> AbstractContextManager:
    """One process at a time, of those that compile the same; where our kernels cannot be imported, all at once."""
    try:
        from qerl_nvfp4.turns import one_process_at_a_time
    except ImportError:  # nvfp4/linear.py says it
        return nullcontext()
    name = f"qerl-update-{hashlib.blake2b(same.encode(), digest_size=8).hexdigest()}"
    return one_process_at_a_time(cache_dir(), name, what, partial(print, flush=True))


def _padded(batch: int, length: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Inputs of a decoder. A mask whose size is no multiple of 16 may need another graph; the third length and the fourth need none."""
    made, half = [], max(32, length // 32 * 16)
    for tokens in (max(32, length // 16 * 16), max(32, length // 16 * 16) - 8, half, half - 8):
        ids = torch.ones(batch, tokens, dtype=torch.long, device=device)
        mask = torch.ones_like(ids)
        mask[0, : 2 if batch > 1 else 0] = 0
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


class WarmUp(TrainerCallback):
    """Compiles when training starts, with one line that says so."""

    def __init__(self, trainer: OnlineTrainer, compiled: CompiledLayers) -> None:
        self._trainer, self._compiled, self._done = trainer, compiled, False

    def on_train_begin(self, args, state, control, **kwargs):
        if self._done:
            return
        self._done, started, took = True, time.perf_counter(), "in the first step"
        trainer, compiled = self._trainer, self._compiled
        if not trainer.is_fsdp_enabled:  # its root gathers what is in no layer, in a forward of its own
            model, plan = trainer.accelerator.unwrap_model(trainer.model), trainer.memory_plan
            length = min((plan.max_model_len if plan is not None else None) or _LONGEST, _LONGEST)
            noisy, autocast = args.aqn and args.aqn_scope == "policy", trainer.accelerator.autocast
            try:
                packing = vars(trainer).get("_packing")
                warm_up(compiled, model, args.per_device_train_batch_size, length, noisy, autocast, packing)
            except RuntimeError as error:  # of a kernel, or out of memory
                compiled.give_up(_said(error))
            if args.device.type == "cuda":
                torch.cuda.empty_cache()  # blocks of these lengths, of which updates of others would make little use
            took = f"{time.perf_counter() - started:.1f} s"
        if not compiled.failed and state.is_world_process_zero:
            name, left = type(compiled.layers[0]).__name__, sum(forward.left for forward in compiled.forwards)
            name += f" ({left} gated delta nets stay as they are)" if left else ""
            print(
                f"torch.compile of {len(compiled.layers) - left} {name} for updates of any length: {took}", flush=True
            )


def compile_for(trainer: OnlineTrainer) -> CompiledLayers | None:
    """Compile the layers of a trainer's model as its `compile_layers` says.

    Raises:
        ValueError: `compile_layers=True` in a run where it cannot be.
    """
    wanted = trainer.args.compile_layers
    reason = None if wanted is False else reason_against(trainer, bool(wanted))
    if wanted is False or (reason is not None and not wanted):
        return None
    try:
        if reason is not None:
            raise ValueError(reason)
        compiled = compile_layers(trainer.accelerator.unwrap_model(trainer.model))
    except ValueError as error:
        if wanted:
            raise ValueError(f"compile_layers=True cannot work: {error}. Leave it out.") from error
        logger.warning(f"The layers are not compiled, so an update takes longer: {error}.")
        return None
    trainer.add_callback(WarmUp(trainer, compiled))
    return compiled
