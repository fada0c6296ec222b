"""Regional torch.compile: the decoder layers of the trainer's model as one compiled function, which all of them share.

Half of an update in eager mode is not arithmetic: casts, additions and copies around LoRA, norms, rotary embedding and SwiGLU, each a kernel
that reads and writes the whole activation. Inductor makes a few of them, forward and backward. A layer at a time, because the layers are
alike: what is compiled for the first serves all, and gradient checkpointing, hidden-state hooks and FSDP 2 stay outside, around it.

    layer(...)  ->  _Forward  ->  the compiled function      training mode, no key/value cache
                              ->  the layer's own forward    generation, evaluation, after a failure (said once)

- **Lengths.** Batch and sequence dimensions are symbolic from the first call on, so a new length compiles nothing.
- **One graph for all passes.** A forward without gradient (old log-probabilities) runs the same graph as the update and drops what it saved,
  so both give the same bits, as eager code does, and half is compiled.
- **Noise** (`noise/hooks.py`) is laid on the norms' weights around the compiled function; a new draw is new values of the same inputs.
- **Same bits again.** Nothing is chosen by timing (`_DETERMINISTIC`), and `warm_up` compiles on shapes that the settings alone decide, so a resumed run
  computes what the uninterrupted one would have.

Nothing of torch's global state is changed; other compiled code in the process (vLLM's) has its own functions and its own limits.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch._dynamo  # not loaded by `import torch`
import torch._inductor.config
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from ..names import unwrap
from ..noise.hooks import laid_on
from ..upstream import OnlineTrainer
from . import attention
from .packing import Packing

logger = logging.getLogger(__name__)

#: of torch.compile: kernels are not chosen by timing them, which may differ from run to run, and with it the order of a sum
_DETERMINISTIC: dict[str, Any] = {"deterministic": True}
#: graphs of one layer class: with and without mask, with and without noise, full and sliding attention, lengths that are multiples of 16 or not
_MOST_GRAPHS = 24
#: arguments by which layers get a cache of keys, values or states
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
#: tokens per sequence of the warm-up, at most
_LONGEST = 1024
_FAILURES = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)


class _Function:
    """A layer class's forward, compiled, until it fails."""

    def __init__(self, forward: Callable, backend: str, deterministic: bool) -> None:
        self.eager, self.failed = forward, False
        known = {name: value for name, value in _DETERMINISTIC.items() if hasattr(torch._inductor.config, name)}
        options = known if deterministic and backend == "inductor" else None
        self._compiled = torch.compile(forward, backend=backend, fullgraph=True, options=options)
        self._limit = torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS)

    def __call__(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._limit:
            return self._compiled(layer, *args, **kwargs)

    def give_up(self, layer: nn.Module, error: Exception) -> None:
        self.failed = True
        reason = str(error).strip().split("\n", 1)[0][:300]
        logger.warning(
            f"{type(layer).__name__} does not compile and runs in eager mode from here on: {type(error).__name__}: {reason}. The results are the "
            "same, an update takes longer; compile_layers=False says that this is wanted."
        )


class CompiledLayers:
    """What `compile_layers` made of a model.

    Args:
        layers: decoder layers, in the order in which they run.
        norm: the norm after them, or None.
        backend: of torch.compile.
        deterministic: False lets inductor choose kernels by timing them.
    """

    def __init__(
        self, layers: list[nn.Module], norm: nn.Module | None, backend: str = "inductor", deterministic: bool = True
    ) -> None:
        self.layers, self.norm = layers, norm
        self.rehearsing: str | None = None  # in `warm_up`: "clean" or "noisy"
        self.ran_compiled = (
            False  # the latest layer; the norm after the layers has no argument that tells generation from an update
        )
        functions: dict[Callable, _Function] = {}
        for module in (*layers, *([norm] if norm is not None else [])):
            forward = type(module).forward
            function = functions.setdefault(forward, _Function(forward, backend, deterministic))
            module.forward = _Forward(self, module, function)
        self.functions = list(functions.values())

    @property
    def failed(self) -> bool:
        """Whether no layer runs compiled any more."""
        return all(layer.forward.function.failed for layer in self.layers)  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Give the layers their own forward back."""
        for module in (*self.layers, self.norm):
            if module is not None and isinstance(vars(module).get("forward"), _Forward):
                del module.forward

    @contextmanager
    def rehearsal(self, noisy: bool) -> Iterator[None]:
        """Inside, each layer also computes its gradients, and drops them."""
        self.rehearsing = "noisy" if noisy else "clean"
        try:
            yield
        finally:
            self.rehearsing = None


class _Forward:
    """Stands before a module's own forward and chooses. Not part of a copy or a pickle: they get the module's own."""

    def __init__(self, owner: CompiledLayers, module: nn.Module, function: _Function) -> None:
        self.owner, self.module, self.function = owner, module, function
        self.is_norm = module is owner.norm
        self.parts = [part for part in module.modules() if not any(part.children())]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
                    return self.function.eager(self.module, *args, **kwargs)
                _mark_dynamic(given)
                output = self.function(self.module, *given[0], **given[1])
                if self.owner.rehearsing:
                    self._drop_gradients(output, hidden)
        except _FAILURES as error:
            self.function.give_up(self.module, error)
            return self(*args, **kwargs)
        self.owner.ran_compiled = True
        return output if graded else _detached(output)

    def _compiles(self, kwargs: Mapping[str, Any]) -> bool:
        if self.function.failed or not self.module.training or torch.is_inference_mode_enabled():
            return False
        if torch.compiler.is_compiling():  # somebody compiles the whole model
            return False
        if self.is_norm:
            return self.owner.ran_compiled
        return not kwargs.get("use_cache") and all(kwargs.get(name) is None for name in _CACHES)

    def _drop_gradients(self, output: Any, hidden: torch.Tensor) -> None:
        outputs = [part for part in _tensors(output) if part.requires_grad]
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        ones = [torch.ones_like(part) for part in outputs]
        torch.autograd.grad(outputs, [hidden, *trained], ones, allow_unused=True)

    def __deepcopy__(self, memo: dict) -> Any:
        copied = memo.get(id(self.module))
        return self if copied is None else MethodType(self.function.eager, copied)

    def __reduce__(self) -> tuple:
        return MethodType, (self.function.eager, self.module)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return tuple(map(_detached, value)) if isinstance(value, tuple) else value


def _mark_dynamic(arguments: Any) -> None:
    """Batch and sequence dimensions of what layers are given: (B, S, ...) activations and rotary tables, (B, 1, S, S) masks, (B, S) or
    (3, B, S) positions, (n,) sequence boundaries. A dimension of 1 stays 1."""
    for tensor in _tensors(arguments):
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
    inner = unwrap(model)
    base = inner if isinstance(inner, PreTrainedModel) else inner.get_base_model()  # type: ignore[operator]
    decoder = base.get_decoder()
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    layers: list[nn.Module] = [
        layer for part in lists for layer in part if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ValueError(f"{type(decoder).__name__} has no list of layers of the kind that transformers checkpoints")
    taken = [layer for layer in layers if "forward" in vars(layer)]
    if taken:
        raise ValueError(
            f"the forward of {type(taken[0]).__name__} was replaced already (a model over several devices?)"
        )
    norms = [
        child
        for name, child in decoder.named_children()
        if "norm" in name.lower() and not any(child.children()) and "forward" not in vars(child)
    ]
    return layers, norms[0] if len(norms) == 1 else None


def compile_layers(model: nn.Module, backend: str = "inductor", deterministic: bool = True) -> CompiledLayers:
    """Run the decoder layers of `model`, and the norm after them, compiled when it trains. Nothing is compiled before the first call.

    Raises:
        ValueError: see `find_layers`.
    """
    return CompiledLayers(*find_layers(model), backend, deterministic)


def reason_against(trainer: OnlineTrainer) -> str | None:
    """Why this run's layers are not compiled where `compile_layers` is not said; None where they are."""
    args = trainer.args
    if args.torch_compile:
        return "torch_compile=True compiles the whole model"
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed gathers weights inside of layers"
    if args.device.type != "cuda":
        return f"it pays on a CUDA device, this is {args.device.type}"
    return None


# --- the start --------------------------------------------------------------------------------------------------------------------


def warm_up(
    compiled: CompiledLayers,
    model: nn.Module,
    batch: int,
    length: int,
    noisy: bool = False,
    autocast: Any = None,
    packed: Packing | None = None,
) -> None:
    """Compile, by a forward and a backward of each layer for `batch` sequences of up to `length` tokens, some of them padding.

    Adds nothing to gradients and leaves random states, training flags and torch's settings as they were. A layer class whose graphs grow with the
    number of lengths runs in eager mode from here on.

    Args:
        noisy: also compile for noise on the norms in training.
        autocast: as in training; a context manager factory.
        packed: where it is on, the sequences come as one row, as in training.
    """
    inner = unwrap(model)
    base = inner if isinstance(inner, PreTrainedModel) else inner.get_base_model()  # type: ignore[operator]
    device = next(base.get_input_embeddings().parameters()).device
    devices = [device.index or torch.cuda.current_device()] if device.type == "cuda" else []
    flags = {module: module.training for module in model.modules()}
    length = max(32, length // 16 * 16)
    try:
        model.train()
        with torch.random.fork_rng(devices=devices), torch.no_grad(), autocast() if autocast else _nothing():
            for kind in (False, True) if noisy else (False,):
                if packed is not None and packed.on:
                    for inputs in packed.examples(batch, length):
                        with compiled.rehearsal(kind), attention.packed_call():
                            base.get_decoder()(**inputs, use_cache=False)
                    continue
                for tokens in (length, length - 8, length - 16, length - 24):
                    ids = torch.ones(batch, tokens, dtype=torch.long, device=device)
                    mask = torch.ones_like(ids)
                    mask[:, : 2 if batch > 1 else 0] = 0
                    with compiled.rehearsal(kind):
                        base.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class WarmUp(TrainerCallback):
    """Compiles when training starts, with one line that says so."""

    def __init__(self, trainer: OnlineTrainer, compiled: CompiledLayers) -> None:
        self._trainer, self._compiled, self._done = trainer, compiled, False

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self._trainer
        if self._done or trainer.is_fsdp_enabled:  # FSDP gathers weights in its root's forward: the first step compiles
            return
        self._done = True
        started = time.perf_counter()
        length = (trainer.memory_plan.max_model_len if trainer.memory_plan is not None else None) or _LONGEST
        batch = args.per_device_train_batch_size
        noisy = args.aqn and args.aqn_scope == "policy"
        warm_up(
            self._compiled,
            trainer.model,
            batch,
            min(length, _LONGEST),
            noisy=noisy,
            autocast=trainer.accelerator.autocast,
            packed=getattr(trainer, "_packing", None),
        )
        count = len(self._compiled.layers)
        if state.is_world_process_zero and not self._compiled.failed:
            print(
                f"{count} {type(self._compiled.layers[0]).__name__} compiled for the update in {time.perf_counter() - started:.1f} s (torch.compile, "
                "any length; from the disk when it starts again).",
                flush=True,
            )


def compile_for(trainer: OnlineTrainer) -> CompiledLayers | None:
    """Compile the layers of a trainer's model as its `compile_layers` says; part of `update.prepare`.

    Raises:
        ValueError: `compile_layers=True` in a run where it cannot be.
    """
    wanted, reason = trainer.args.compile_layers, reason_against(trainer)
    if wanted is False or (wanted is None and reason is not None):
        return None
    if reason is not None and (trainer.args.torch_compile or trainer.is_deepspeed_enabled):
        raise ValueError(f"compile_layers=True cannot work: {reason}. Leave one of the two out.")
    try:
        compiled = compile_layers(trainer.accelerator.unwrap_model(trainer.model))
    except ValueError as error:
        if wanted:
            raise ValueError(f"compile_layers=True cannot work: {error}. Leave it out.") from error
        logger.warning(f"The layers are not compiled, so an update takes longer: {error}.")
        return None
    trainer.add_callback(WarmUp(trainer, compiled))
    return compiled
