"""The workload of one process, read from the configuration and the data: lengths, counts and formats."""

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..update import padded

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: fewest tokens per engine step, as in TRL
MAX_BATCHED_TOKENS = 4096
#: tokens per engine step if a plan has room: each step decodes the whole base. The largest is vLLM's own there
LARGER_STEPS = (16384, 8192)
#: tokens of a prompt of unknown length (streamed data, pictures, environments, a rollout function)
ASSUMED_PROMPT = 1024
#: minimum length of an engine; the probe at its start uses 20 tokens (rollout/probe.py)
SHORTEST_ENGINE = 64
#: prompts tokenized at a time
_TOKENIZED_AT_ONCE = 1000
#: names of bitsandbytes' AdamW in `TrainingArguments.optim`
_ADAMW_OF_BITSANDBYTES = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit")


@dataclasses.dataclass(frozen=True)
class Workload:
    """The workload of one process.

    `batch`: sequences of one backward pass (`per_device_train_batch_size`). `accumulation`: backward passes per update.
    `completions`: sequences generated at a time. `rollout`: "transformers", "colocate" or "server" (vLLM). `padded`:
    prompts of different lengths, so attention gets a mask. `packed`: the sequences of a backward pass form one row
    without padding (`update/packing.py`), with each prompt shared by `generations` completions. `compiled`, `fused`: of
    decoder layers, of LoRA layers. `delta_kernels`: gated delta nets use flash-linear-attention.
    `gradient_checkpointing`: decoder layers recompute their activations; None: except the last `kept_layers`, as many
    as fit. `dtype_bytes`: of unquantized numbers. `batched_tokens`: of one engine step; None: `MAX_BATCHED_TOKENS`, or
    one of `LARGER_STEPS` if a plan has room. `kv_limit` (bytes) and `utilization` (of the GPU) replace the planned KV
    cache. `sharded`: FSDP 2. `deepspeed`: ZeRO-2. `cpu`: no GPU, see `on_a_cpu`.
    """

    batch: int = 8
    prompt_length: int = 512
    completion_length: int = 1024
    completions: int = 64
    accumulation: int = 1
    lora_rank: int = 32
    optimizer: str = "adamw_torch_fused"
    gradient_checkpointing: bool | None = True
    kept_layers: int = 0
    base_format: str = "nvfp4"
    dtype_bytes: int = 2
    attention: str = "sdpa"
    padded: bool = True
    packed: bool = False
    generations: int = 1
    compiled: bool = False
    fused: bool = False
    delta_kernels: bool = False
    processes: int = 1
    sharded: bool = False
    deepspeed: bool = False
    rollout: str = "transformers"
    share_weights: bool = True
    sleep: bool = False
    tensor_parallel: int = 1
    graphs: bool = True
    batched_tokens: int | None = None
    kv_dtype_bytes: int = 2
    kv_limit: int | None = None
    utilization: float | None = None
    cpu: bool = False

    @property
    def length(self) -> int:
        return self.prompt_length + self.completion_length

    @property
    def tokens(self) -> int:
        """Tokens of one backward pass: all sequences at full length, or a packed row, with each shared prompt once."""
        if not self.packed:
            return self.batch * self.length
        prompts = -(-self.batch // max(1, self.generations))
        return padded(prompts * (self.prompt_length - 1) + self.batch * self.completion_length)

    @property
    def keys(self) -> int:
        """Tokens read by attention: in a packed row, each sequence's own prompt."""
        if not self.packed:
            return self.tokens
        return max(self.tokens, padded(self.batch * (self.length - 1)))

    @property
    def step_tokens(self) -> int:
        return self.batched_tokens or MAX_BATCHED_TOKENS

    @property
    def colocated(self) -> bool:
        return self.rollout == "colocate"

    @property
    def shares_weights(self) -> bool:
        """Whether the engine reads the trainer's tensors. Fully trained weights are streamed into a copy."""
        return self.share_weights and self.tensor_parallel == 1 and self.base_format != "full"

    def with_engines_of(self, gpus: int) -> "Workload":
        """Return the workload with tensor-parallel engines, each serving all processes on its `gpus` GPUs."""
        completions = self.completions // self.tensor_parallel * gpus
        return dataclasses.replace(self, tensor_parallel=gpus, completions=completions)

    @property
    def recomputes_by_default(self) -> bool:
        return self.gradient_checkpointing is not False

    def under_fsdp(self) -> "Workload":
        """Return the workload with the trainer's weights sharded, and a copy in the engine. Processes gather a layer
        together but plan alone, so by default all layers recompute."""
        recomputed, optimizer = self.recomputes_by_default, optimizer_under_fsdp(self.optimizer)
        return dataclasses.replace(
            self, share_weights=False, sharded=True, gradient_checkpointing=recomputed, optimizer=optimizer
        )

    def under_zero2(self) -> "Workload":
        """Return the workload with the optimizer sharded by DeepSpeed; by default all layers recompute."""
        recomputed = self.recomputes_by_default
        return dataclasses.replace(self, deepspeed=True, gradient_checkpointing=recomputed)

    def on_a_cpu(self) -> "Workload":
        """Return the workload without a GPU: by default all layers recompute; vLLM's KV cache has the model's dtype."""
        space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")  # vLLM's own, in GiB; it overrides arguments
        limit, recomputed = int(space) * 2**30 if space else self.kv_limit, self.recomputes_by_default
        return dataclasses.replace(
            self, cpu=True, packed=False, compiled=False, graphs=False, gradient_checkpointing=recomputed,
            kv_dtype_bytes=self.dtype_bytes, batched_tokens=self.step_tokens, kv_limit=limit,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and completion; `limit`: longest sequence of model and engine, if known. `counted`
    is False if the prompt's length is `ASSUMED_PROMPT`."""

    prompt: int
    completion: int
    limit: int | None = None
    counted: bool = True

    @property
    def engine(self) -> int | None:
        """An engine's `max_model_len` for these lengths; the limit if no prompt was counted."""
        if not self.counted:
            return self.limit
        length = max(SHORTEST_ENGINE, self.prompt + self.completion)
        return length if self.limit is None else min(self.limit, length)


def on_a_gpu(base_format: str) -> dict[str, Any]:
    """Return the default fields for updates on a GPU; LoRA on layers of bitsandbytes is not fused."""
    return {"packed": True, "compiled": True, "fused": base_format in ("nvfp4", "bf16")}


def workload_of(
    args: Any,
    lengths: Lengths,
    *,
    lora_rank: int = 32,
    lora_dropout: float = 0.0,
    dtype_bytes: int = 2,
    attention: str = "sdpa",
) -> Workload:
    """Read each process's workload from a `QeRLConfig`; fields of model and device default to `on_a_gpu`.

    Args:
        lora_rank, lora_dropout, dtype_bytes, attention: of the model; the configuration lacks them.
    """
    fast = on_a_gpu(args.base_format)
    engine = args.vllm_engine_kwargs or {}
    engine = json.loads(engine) if isinstance(engine, str) else engine
    engine = {name: value for name, value in engine.items() if value is not None}  # vLLM, too, treats None as unset
    rollout = args.vllm_mode if args.use_vllm else "transformers"
    tensor_parallel = args.vllm_tensor_parallel_size if rollout == "colocate" else 1
    completions = args.per_device_train_batch_size * args.steps_per_generation * tensor_parallel
    return Workload(
        batch=args.per_device_train_batch_size,
        prompt_length=lengths.prompt,
        completion_length=lengths.completion,
        completions=engine.get("max_num_seqs", completions),
        accumulation=args.gradient_accumulation_steps,
        lora_rank=lora_rank,
        optimizer=args.optim.value,
        gradient_checkpointing=None if args.recompute_as_needed else args.gradient_checkpointing,
        base_format=args.base_format,
        dtype_bytes=dtype_bytes,
        attention=attention if attention in ("sdpa", "eager") else "flash",
        packed=fast["packed"] and args.padding_free is not False and attention == "sdpa",
        generations=1 if lora_dropout else _together(args),
        compiled=fast["compiled"] and args.compile_layers is not False and not args.torch_compile,
        fused=fast["fused"] and args.fused_lora and not lora_dropout,
        processes=args.world_size,
        rollout=rollout,
        share_weights=args.share_weights,
        sleep=args.vllm_enable_sleep_mode,
        tensor_parallel=tensor_parallel,
        graphs=not engine.get("enforce_eager", False),
        batched_tokens=engine.get("max_num_batched_tokens"),
        kv_dtype_bytes=1 if str(engine.get("kv_cache_dtype", "auto")).startswith("fp8") else 2,
        kv_limit=engine.get("kv_cache_memory_bytes"),
        utilization=engine.get("gpu_memory_utilization", args.vllm_gpu_memory_utilization),
    )


def _together(args: Any) -> int:
    """Count a prompt's completions that surely share a backward pass when `update/batches.py` deals a rollout."""
    from ..update import batches

    batch, count = args.per_device_train_batch_size, args.num_generations
    steps, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
    dealt = steps == 1 or (accumulation % steps == 0 and batches.order_is_free(args))
    if not dealt or (batch * steps) % count or (batch % count and count % batch):
        return 1
    return min(batch, count)


def workload_of_file(
    path: str | os.PathLike[str], prompt_length: int, processes: int = 1, instead: Mapping[str, Any] | None = None
) -> tuple[str | None, Workload]:
    """Read (model, workload of one process) from a run's YAML file, for `processes`; it lacks the prompts' length.
    `instead`: values that replace the file's, as on the command line of a run.

    Raises:
        `ValueError`: the batch cannot be divided among the processes.
    """
    from peft import LoraConfig
    from trl import ModelConfig, get_peft_config

    from ..config import QeRLConfig
    from ..model.lora import default_lora_config, settle_model_config
    from ..support.recipes import contents, parser_of

    class Config(QeRLConfig):
        world_size = processes  # elsewhere set by the launcher

    values = contents(Path(path)) | dict(instead or {})

    def build(kind: Any, **changed: Any) -> Any:
        names = {field.name for field in dataclasses.fields(kind) if field.init}
        parser = parser_of(kind)  # as in a run: "64" is a number in a numeric field
        parser.set_defaults(**{name: value for name, value in values.items() if name in names} | changed)
        return parser.parse_args_into_dataclasses(args=[])[0]

    # this machine need not have the run's GPU
    args, model = build(Config, use_cpu=True, bf16=False, fp16=False), build(ModelConfig)
    settle_model_config(model, values, args.base_format)
    adapter = cast(LoraConfig, get_peft_config(model) or default_lora_config())
    lengths = Lengths(prompt_length, args.max_completion_length)
    dtype = (args.model_init_kwargs or {}).get("dtype", model.dtype)
    attention = model.attn_implementation or "sdpa"
    of_model: dict[str, Any] = {"lora_rank": adapter.r, "lora_dropout": adapter.lora_dropout, "attention": attention}
    work = workload_of(args, lengths, dtype_bytes=dtype_bytes_of(dtype, args.base_format), **of_model)
    return model.model_name_or_path, work.on_a_cpu() if values.get("use_cpu") else work


def run_lengths(trainer: Any) -> Lengths:
    """Find the lengths of a trainer's run from its training and evaluation data, tokenized as in a rollout.

    Raises:
        `ValueError`: prompts leave no token for a completion, or without an engine less than `max_completion_length`.
    """
    args, completion = trainer.args, trainer.args.max_completion_length
    who, limit = "the model", _context(trainer.model)
    of_engine = args.vllm_max_model_length if args.use_vllm else None
    if of_engine is not None and (limit is None or of_engine < limit):
        who, limit = "the engine (vllm_max_model_length)", of_engine
    lengths = list(prompt_lengths(trainer))
    if not lengths:
        prompt = ASSUMED_PROMPT if limit is None else min(ASSUMED_PROMPT, max(1, limit - completion))
        return Lengths(prompt, completion if limit is None else min(completion, limit - prompt), limit, counted=False)
    longest = max(lengths)
    if limit is not None:
        needed = 1 if args.use_vllm else completion
        count = sum(length + needed > limit for length in lengths)
        short = sum(length + completion > limit for length in lengths)
        if count:
            raised = "" if who == "the model" else ", or raise vllm_max_model_length"
            raise ValueError(
                f"{count} of {len(lengths)} prompts leave less than {needed} tokens for a completion: the longest has "
                f"{longest} tokens with its chat template, and {who} takes {limit} in all. Filter them out of the "
                f"dataset{raised}, or lower max_completion_length."
            )
        if short:
            logger.warning(
                "%d of %d prompts leave less than max_completion_length=%d tokens for a completion: the longest has "
                "%d tokens with its chat template, and %s takes %d in all. Their completions are cut short.",
                *(short, len(lengths), completion, longest, who, limit),
            )  # fmt: skip
        completion = min(completion, limit - min(lengths))
        longest = min(longest, limit - completion) if longest + completion > limit else longest
    return Lengths(longest, completion, limit)


def _context(model: Any) -> int | None:
    """Return the maximum tokens of prompt and completion, if the model's configuration has it."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_rollout(model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> None:
    """Refuse to train on sequences too long for the model, if prompts could not be counted at start ([`run_lengths`]).

    Raises:
        `ValueError`: a sequence is too long; the message has the longest.
    """
    limit = _context(model)
    pairs = zip(prompts, completions, strict=True)
    total, prompt = max(((len(p) + len(c), len(p)) for p, c in pairs), default=(0, 0))
    if limit is not None and total > limit:
        raise ValueError(
            f"A prompt of {prompt} tokens with its completion of {total - prompt} is longer than the model takes, "
            f"{limit} tokens (max_position_embeddings). Leave such prompts out, or lower max_completion_length."
        )


def prompt_lengths(trainer: Any) -> Iterator[int]:
    """Yield the tokens of each prompt of the training and evaluation data; nothing if unknown before the run.

    Raises:
        `ValueError`: a token above the vocabulary. On a GPU, an unspecific device assertion would end the process.
    """
    from datasets import Dataset

    # RLOO has none of these
    if any(map(vars(trainer).get, ("rollout_func", "environments", "environment_factories"))):
        return
    evaluation = trainer.eval_dataset
    datasets = [trainer.train_dataset, *(evaluation.values() if isinstance(evaluation, dict) else [evaluation])]
    datasets = [dataset for dataset in datasets if dataset is not None]
    for dataset in datasets:
        if not isinstance(dataset, Dataset) or {"image", "images"} & set(dataset.column_names):
            return
    known = trainer.model.config.get_text_config().vocab_size
    for dataset in datasets:
        prompts = dataset.select_columns("prompt")
        for start in range(0, len(prompts), _TOKENIZED_AT_ONCE):
            batch = prompts[start : start + _TOKENIZED_AT_ONCE]["prompt"]
            for ids in trainer._tokenize_prompts(batch)[0]:
                if max(ids, default=0) >= known:
                    raise ValueError(
                        f"A prompt has the token {max(ids)}, and the model knows {known} tokens (vocab_size). Pass the "
                        "model's own tokenizer as processing_class, or a base with resized embeddings "
                        "(resize_token_embeddings)."
                    )
                yield len(ids)


def dtype_bytes_of(dtype: "torch.dtype | str | None", base_format: str) -> int:
    """Return the bytes per unquantized number; by default bf16 for an adapter's base, float32 for a trained model."""
    if dtype is None or dtype == "auto":
        return 4 if base_format == "full" and dtype is None else 2
    return 4 if "32" in str(dtype) else 2


def optimizer_under_fsdp(name: str) -> str:
    """Return the optimizer under FSDP for `TrainingArguments.optim` = `name`. bitsandbytes' kernels need whole tensors
    ("got mixed torch.Tensor and DTensor" at the first step), so torch's AdamW replaces its AdamW: same numbers, not
    rounded to 8 bits, 8 bytes per trained parameter over all processes."""
    return "adamw_torch_fused" if name in _ADAMW_OF_BITSANDBYTES else name
