"""Skip padding: TRL's batch goes through the model as one row of tokens; its losses get the usual batch.

TRL pads prompts and completions to the longest of their batch and computes the padding. [`Packing`] computes the
log-probabilities and entropies on a packed row (row.py) with attention within sequences (attention.py), equal prompts
once, the head on requested tokens only, in TRL's chunks; and returns them as TRL does, (B, L) with zeros on padding.
TRL's losses, and number and size of its micro-batches, are unchanged. [`batches.deal`] assigns completions to
micro-batches, [`batches.TokenBudget`] micro-batches to passes.

Support is checked from the model's attributes ([`why_not`]) and then by a trial ([`Packing.check`]): a few sequences,
padded and packed, before the first step. Unsupported models keep TRL's own way, with one log message.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from accelerate.utils import DistributedType, is_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from trl.kernels.chunked_logprob import _torch_transform

from ..nvfp4.linear import decoded_weights
from ..support.phases import evaluation_mode
from ..support.trl import OnlineTrainer
from . import attention, batches, row

logger = logging.getLogger(__name__)

#: tokens of the trial's prompts; prompt index and tokens of each completion, the first as long as any. One prompt
#: length: with absolute positions, left padding changes TRL's own numbers
_PROMPT_TOKENS, _TRIED = 14, ((0, 11), (1, 7), (0, 5))
#: most numbers of the output head's rows that [`candidate_logps`] copies at a time: half a tile of TRL's head
_GATHERED = 2**26


class Packing:
    """Packs the batches of one trainer's models, if supported."""

    def __init__(self, trainer: OnlineTrainer):
        self.trainer = trainer
        self.on = False
        self.budget = batches.TokenBudget(trainer)
        self.longest = batches.LongestPass()
        #: models wrapped at the start of training are tried at the first batch
        self._untried = False
        self._models: list[PreTrainedModel] = []

    def prepare(self) -> None:
        """Switch the models to packed attention, and try them now if possible.

        Raises:
            `ValueError`: unsupported `padding_free=True`.
        """
        trainer = self.trainer
        if trainer.args.padding_free is False:
            return
        reason = self.reason_against()
        if reason is not None:
            self._leave(reason)
            return
        self._models = self._all_models()
        attention.register()
        for model in self._models:
            _set_attention(model, attention.NAME)
        self.on = self._untried = True
        kind = trainer.accelerator.distributed_type
        if kind not in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            self.check(trainer.model)

    def reason_against(self) -> str | None:
        """Return why batches cannot be packed, by attributes of the trainer's models; `None`: packing can be tried."""
        trainer = self.trainer
        device, model = trainer.accelerator.device, trainer.accelerator.unwrap_model(trainer.model)
        slow = attention.fast_kernel_is_missing(device)
        if slow is not None and not (trainer.args.padding_free and device.type == "cpu"):
            return slow
        if trainer.args.neftune_noise_alpha:
            return "neftune_noise_alpha draws noise scaled by a row's length, which would be that of all sequences"
        if is_peft_model(model) and any(config.is_prompt_learning for config in model.peft_config.values()):
            return "the adapter puts virtual tokens before each sequence"
        return next(filter(None, map(self._why_not, self._all_models())), None)

    def _why_not(self, model: PreTrainedModel) -> str | None:
        trainer, implementation = self.trainer, model.config.get_text_config()._attn_implementation
        parallel = trainer.accelerator.parallelism_config
        if parallel is not None and (parallel.cp_size > 1 or parallel.sp_size > 1):
            return "sequences are split over processes (context or sequence parallel)"
        if implementation != "sdpa":
            return f"attn_implementation={implementation!r} is not PyTorch's own ('sdpa'), which alone is replaced"
        limit, longest = alike_up_to(model), trainer.longest_sequence
        if limit is not None and (longest is None or longest > limit):
            length = "more" if longest is None else f"up to {longest}"
            return (
                f"a sequence of more than {limit} tokens would change the rotary embedding of all others in its row, "
                f"and sequences of this run may have {length} (rope_type 'longrope' or 'dynamic')"
            )
        return why_not(model)

    def _all_models(self) -> list[PreTrainedModel]:
        found = [self.trainer.model, self.trainer.ref_model]
        return [self.inner(model) for model in found if model is not None]

    def inner(self, model: nn.Module) -> PreTrainedModel:
        """Return the transformers model without wrappers."""
        found = self.trainer.accelerator.unwrap_model(model)
        return cast(PreTrainedModel, found.get_base_model() if is_peft_model(found) else found)

    def _leave(self, reason: str) -> None:
        self.on = False
        for model in self._models:
            if model.config.get_text_config()._attn_implementation == attention.NAME:
                _set_attention(model, "sdpa")
        if self.trainer.args.padding_free:
            raise ValueError(f"padding_free=True cannot work here: {reason}. Leave it out: TRL then pads the batches.")
        if self.trainer.accelerator.device.type != "cpu":
            logger.warning("padding_free is off, so updates compute padding as in TRL, which is slower: %s.", reason)

    @torch.no_grad()
    def check(self, model: nn.Module) -> None:
        """Compare the same sequences padded and packed, in evaluation mode; and check that sequences are independent.

        The bound is four times the difference between TRL's batched and single results, plus 0.01 nats, on every
        process.
        """
        self._untried = False
        trainer = self.trainer
        by_trl = trainer._padded_logps
        ids, mask, width = self._trial()
        reason = None
        # FP8 activations turn the rounding of an attention into other values, and say nothing about packing
        exact = decoded_weights(model, "w4a16")
        with evaluation_mode(model), exact, attention.trial(trainer.longest_sequence):
            try:
                packed = self._packed(model, ids, mask, width)[0]
                padded = by_trl(model, ids, mask, width)[0]
                alone = torch.cat([by_trl(model, ids[i : i + 1], mask[i : i + 1], width)[0] for i in range(len(ids))])
                # with another first completion, the later ones in the row may not move beyond rounding
                other = ids.clone()
                other[0, -width:] = ids[0, -width:].roll(3)
                moved = self._packed(model, other, mask, width)[0]
            except attention.CannotPack as error:
                reason = str(error)
            except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                reason = f"a packed row fails in it ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
        if reason is None:
            asked = mask[:, -width:].bool()

            def apart(a: torch.Tensor, b: torch.Tensor, lines: tuple[int, ...]) -> float:
                return (a - b).float().abs()[list(lines)][asked[list(lines)]].mean().item()

            every = tuple(range(len(ids)))
            rounding, leak = apart(padded, alone, every), apart(packed, moved, (1, 2))
            # products are rounded to autocast's type, for any weight dtype
            mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
            rounded_to = mixed.get(trainer.accelerator.mixed_precision, self.inner(model).dtype)
            bound = 4 * rounding + (1e-2 if rounded_to == torch.bfloat16 else 2e-3)
            found = apart(packed, padded, every)
            if not found <= bound:
                reason = (
                    f"packed, its log-probabilities differ from the padded ones by {found:.4f} nats ({bound:.4f} is "
                    "rounding): its layers see more than their own sequence, or count positions in another way"
                )
            elif not leak <= rounding:
                reason = f"a sequence changes log-probabilities of others in a packed row by {leak:.2g} nats"
        refused = trainer.accelerator.gather(torch.tensor([reason is not None], device=trainer.accelerator.device))
        if bool(refused.any()):
            self._leave(reason or "another process cannot pack")

    def _trial(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Make a padded batch of fixed tokens: two completions of one prompt, one of another, all lengths different."""
        vocabulary = self._models[0].config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(vocabulary, (2, _PROMPT_TOKENS), generator=generator)
        width = max(length for _, length in _TRIED)
        ids = torch.full((len(_TRIED), _PROMPT_TOKENS + width), self.trainer._tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for line, (which, length) in enumerate(_TRIED):
            end = _PROMPT_TOKENS + length
            ids[line, :end] = torch.cat([prompts[which], torch.randint(vocabulary, (length,), generator=generator)])
            mask[line, :end] = 1
        device = self.trainer.accelerator.device
        return ids.to(device), mask.to(device), width

    def examples(self, count: int, length: int) -> list[dict[str, Any]]:
        """Make inputs of a decoder (no labels): rows of `count` sequences of up to `length` tokens, as in training."""
        device, made = self.trainer.accelerator.device, []
        for tokens in (length, length - row.MULTIPLE, length - 3 * row.MULTIPLE):
            ids = torch.ones(count, max(tokens, row.MULTIPLE), dtype=torch.long)
            found = row.sequences(ids, ids, ids.shape[1] // 2)
            built = row.build(found, ids.shape[1] // 2, device, share=not _drops(self.trainer.model, in_training=True))
            made.append({"input_ids": built.input_ids, "position_ids": built.position_ids, **built.segments._asdict()})
        return made

    def __call__(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        top_ids: torch.Tensor | None = None,
        **pictures: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None:
        """Compute TRL's `_get_per_token_logps_and_entropies` on packed rows; `None` if TRL has to compute it."""
        if not self.on or any(value is not None for value in pictures.values()):
            return None
        if self._untried:
            self.check(model)
            if not self.on:
                return None
        of_a_loss = model.training and torch.is_grad_enabled() and batch_size is None and not compute_aux_loss
        if of_a_loss:
            compute = partial(self._packed, model, logits_to_keep=logits_to_keep, compute_entropy=compute_entropy)
            together = self.budget.logps(compute, input_ids, logits_to_keep)
            if together is not None:
                return together
        return self._packed(
            model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, top_ids
        )

    def _packed(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        top_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        found = row.sequences(input_ids, attention_mask, logits_to_keep)
        whole, size = compute_aux_loss, batch_size or len(input_ids)
        one_row = size >= len(input_ids)
        alike = self.trainer.accelerator.num_processes > 1 or whole  # every process calls the model as often
        if not whole and (one_row or not alike):
            found = [sequence for sequence in found if len(sequence.completion)] or found[:1]
        share = not whole and not _drops(model)
        if one_row:
            chosen = row.rows(found)
        elif alike:
            chosen = row.rows(found, count=size)
        else:
            chosen = row.rows(found, limit=size * input_ids.shape[1], share=share)
        shape = (input_ids.shape[0], logits_to_keep)
        logps, entropies, losses, destinations = [], [], [], []
        for sequences in chosen:
            built = row.build(sequences, logits_to_keep, input_ids.device, share=share, whole=whole)
            inputs = built.inputs()
            if whole:
                inputs["output_router_logits"] = True
            self.longest.begin(built.input_ids.shape[1], input_ids.device)
            with self.trainer.accelerator.autocast(), attention.packed_call():
                # TRL's head takes `labels` and shifts them itself; it ignores them if `shift_labels` is given
                output = model(**inputs, fused_lm_head=True)
            destinations.append(built.destination)
            logp = output.log_probs[0, built.scored]
            if top_ids is not None:
                logp = candidate_logps(logp, built.scored, top_ids.flatten(0, 1)[built.destination])
            logps.append(logp)
            if compute_entropy:
                entropies.append(output.entropy[0, built.measured])
            if whole:
                losses.append(output.aux_loss)
        place = torch.cat(destinations)

        def padded(parts: list[torch.Tensor]) -> torch.Tensor:
            values = torch.cat(parts)
            empty = values.new_zeros(shape[0] * shape[1], *values.shape[1:])
            return empty.index_copy(0, place, values).view(*shape, *values.shape[1:])

        loss = torch.stack(losses).mean() if whole else None
        return padded(logps), padded(entropies) if compute_entropy else None, loss

    def logps(self, padded: Callable[..., tuple], model: Any, input_ids: torch.Tensor, *args: Any, **kw: Any) -> Any:
        """Compute without padding if possible, else with TRL's method (`padded`). With `top_ids`, (B, L, K), the
        log-probabilities are (B, L, 1 + K): of these tokens, too."""
        found, top_ids = self(model, input_ids, *args, **kw), kw.pop("top_ids", None)
        if found is None:
            self.longest.begin(input_ids.numel(), input_ids.device)
            found = padded(model, input_ids, *args, **kw)
            if top_ids is not None:
                logps, last = found[0], input_ids.shape[1] - 1
                line, place = args[0][:, -logps.shape[1] :].nonzero(as_tuple=True)  # of the mask
                places = line * last + last - logps.shape[1] + place
                values = candidate_logps(logps[line, place], places, top_ids[line, place])
                empty = logps.new_zeros(*logps.shape, values.shape[1])
                found = empty.index_put((line, place), values), *found[1:]
        return found

    def dealt(self, made: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Order a rollout's micro-batches for the update, and group them into passes."""
        free = batches.order_is_free(self.trainer)
        if free:
            made = batches.deal(made, self.trainer.args.gradient_accumulation_steps)
        return self.budget.plan(made, share=not _drops(self.trainer.model), free=free)


def candidate_logps(logps: torch.Tensor, places: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities `logps` (N,) of labels, by TRL's head, and those of other tokens `ids` (N, K): (N, 1+K).

    From K + 1 rows of the head per position: log p(v) = log p(label) + z(v) - z(label) with logits z. The vocabulary is
    not read again, in the backward neither: that of log p(label) has the normaliser's gradient. `places`: (N,), of the
    labels in the model's output.
    """
    head: Any = logps.grad_fn  # TRL's autograd function, which has hidden states and the head's settings
    while type(head).__name__ != "ChunkedLogProbFunctionBackward":
        head = next(node for node, _ in head.next_functions if node is not None)
    hidden, weight, bias, labels, *_ = head.saved_tensors
    if len(hidden) != len(places):  # on a GPU it has only the positions with a label
        hidden, labels = hidden[places], labels[places]

    def logits(states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.embedding(tokens, weight).to(head.compute_dtype)
        z = torch.bmm(rows, states.to(head.compute_dtype)[..., None])[..., 0]  # rounded as in TRL's head
        z = z if bias is None else z + bias[tokens].to(z.dtype)
        return _torch_transform(z.float(), **head.kernel_args)

    tokens = torch.cat([labels[:, None], ids], dim=1)
    size = max(1, _GATHERED // (tokens.shape[1] * hidden.shape[1]))
    chunks = zip(hidden.split(size), tokens.split(size), strict=True)
    z = torch.cat([checkpoint(logits, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks])
    return logps[:, None] + z - z[:, :1]


def _drops(model: nn.Module, in_training: bool = False) -> bool:
    """Whether dropout is active, or would be in training: then completions cannot share a prompt."""
    return any(isinstance(m, nn.Dropout) and (m.training or in_training) and m.p > 0 for m in model.modules())


def alike_up_to(model: PreTrainedModel) -> int | None:
    """Return the length up to which rotary embeddings do not depend on a batch's longest sequence; `None`: any."""
    text = model.config.get_text_config()
    found = text.to_dict().get("rope_parameters") or {}
    of_layers = [found] if "rope_type" in found else [rope for rope in found.values() if isinstance(rope, dict)]
    longest = [rope for rope in of_layers if any(kind in rope.get("rope_type", "") for kind in ("longrope", "dynamic"))]
    limits = (rope.get("original_max_position_embeddings") or text.max_position_embeddings for rope in longest)
    return min(limits, default=None)


def why_not(model: PreTrainedModel) -> str | None:
    """Return why a model cannot be packed, by its attributes; `None` if packing can be tried."""
    name, text = type(model).__name__, model.config.get_text_config()
    if not model._can_set_attn_implementation() or not model._supports_flash_attn:
        return f"{name} has its own attention code, which needs a mask"
    if model._is_stateful:
        return f"{name} carries a state from token to token"
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"{name} has layers of another kind ({', '.join(sorted(kinds))})"
    # names of an attention layer's dropout rate as a number; other dropout is a module
    names = ("attention_dropout", "attn_dropout", "dropout")
    said = text.to_dict()
    found = [said.get("attention_dropout")]  # layers may read it
    for module in model.modules():
        attends = "attention" in type(module).__name__.lower()
        found += map(vars(module).get, names if attends else names[:1])
    dropped = max((value for value in found if isinstance(value, float)), default=0.0)
    if dropped:
        return f"attention_dropout={dropped:g} drops attention weights in training"
    if said.get("attention_chunk_size"):
        return f"{name} attends in chunks"
    return None


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention of `model`'s text part; a tower for pictures keeps its own."""
    text = model.config.get_text_config()
    if text is model.config:
        model.set_attn_implementation(name)
        return
    (key,) = (key for key in model.config.sub_configs if getattr(model.config, key) is text)
    model.set_attn_implementation({key: name})
