"""Accuracy on problems with one final answer: greedy or sampled, noise off, with confidence intervals.

`qerl-trl eval` runs the paper's protocol (Section 4: temperature 0.6, top-p 0.95, at most 4096 new tokens) on its
benchmarks, with transformers or vLLM. An answer counts if the protocol's grader (grading.py) finds the *whole* stated
answer (the last `#### ...` or `\\boxed{...}`) equal to the reference.
"""

import copy
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from peft import PeftModel
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed

from ..checkpoint import records
from ..checkpoint.settings import TOKENIZER, run_settings
from ..rollout.sampling import end_tokens, of_the_model_alone, stored
from ..rollout.vllm.plugin import CheckpointEngine
from .data import ANSWERS, first, from_hub, is_saved, read, split_named, with_prompts
from .grading import BOXED_PROMPT, grader_of, stated, verdicts
from .task import Task

_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Accuracy:
    """Share of problems solved, with its 95 % Wilson score interval."""

    correct: int
    total: int

    @property
    def value(self) -> float:
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        p, n, z = self.value, self.total, _Z95
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    def as_dict(self) -> records.Accuracy:
        return {"correct": self.correct, "total": self.total, "accuracy": self.value, "interval95": list(self.interval)}

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}] ({self.correct} of {self.total})"


def paired_difference(before: Iterable[bool], after: Iterable[bool]) -> tuple[float, float, float]:
    """Return (difference, low, high): mean change in accuracy on the same problems and its 95 % interval, fractions.

    Normal approximation of paired differences; if all changed alike, or none did, the interval of Agresti and Min
    (Statistics in Medicine 2005), with half a problem added to each kind.
    """
    differences = [int(b) - int(a) for a, b in zip(before, after, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / max(n - 1, 1)
    if variance == 0:
        more, centre = n + 2, sum(differences) / (n + 2)
        half = _Z95 * math.sqrt((abs(sum(differences)) + 1) / more - centre**2) / math.sqrt(more)
        return mean, max(-1.0, centre - half), min(1.0, centre + half)
    half = _Z95 * math.sqrt(variance / n)
    return mean, mean - half, mean + half


def sampled_accuracy(correct: list[list[bool]]) -> records.Accuracy:
    """Compute the accuracy of several verdicts per problem (`correct`); its interval takes problems as independent."""
    shares = [sum(row) / len(row) for row in correct]
    n, samples = len(shares), len(correct[0])
    if samples == 1:
        return Accuracy(sum(row[0] for row in correct), n).as_dict()
    mean = sum(shares) / n
    variance = sum((share - mean) ** 2 for share in shares) / max(n - 1, 1)
    half = _Z95 * math.sqrt(variance / n)
    interval = [max(0.0, mean - half), min(1.0, mean + half)]
    if len({sum(row) for row in correct}) == 1:  # no variance between problems: each counts as one completion
        interval = list(Accuracy(round(mean * n), n).interval)
    return {"correct": sum(map(sum, correct)), "total": n, "accuracy": mean, "interval95": interval}


# --- protocols ------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """A benchmark and its settings. `samples`: completions per problem, more for small sets. `grader`: see grading."""

    dataset: str
    config: str | None = None
    split: str = "test"
    system_prompt: str | None = BOXED_PROMPT
    samples: int = 1
    temperature: float = 0.6
    top_p: float = 0.95
    max_new_tokens: int = 4096
    grader: str = "math"
    chat_template_kwargs: dict[str, Any] | None = None


PROTOCOLS = {
    "gsm8k": Protocol("openai/gsm8k", "main"),
    "math500": Protocol("HuggingFaceH4/MATH-500"),
    "amc23": Protocol("math-ai/amc23", samples=8),
    "aime24": Protocol("HuggingFaceH4/aime_2024", split="train", samples=8),
    "aime25": Protocol("math-ai/aime25", samples=8),
}


def load_problems(protocol: Protocol, limit: int | None = None) -> Dataset:
    """Load a benchmark (Hub id, file or folder, as for a task) with the columns `prompt` and `answer`."""
    local = Path(protocol.dataset)
    if local.exists():
        splits = read(local, as_text=ANSWERS)
        whole = len(splits) == 1 and (local.is_file() or is_saved(local))
        data = next(iter(splits.values())) if whole else split_named(splits, protocol.split, "the split")
    else:
        data = from_hub(protocol.dataset, protocol.config, protocol.split, f"{protocol.dataset!r}")
    data = with_prompts(first(data, limit), protocol.system_prompt, named=protocol.dataset)
    return data.select_columns(["prompt", "answer"])


def evaluate(
    protocol: Protocol,
    generate: Callable[[Dataset], list[str]],
    limit: int | None = None,
    seed: int = 0,
    problems: Dataset | None = None,
    verdicts_of: Callable[[list[str], Dataset], list[bool]] | None = None,
    answer_format: str = "marked",
) -> dict[str, Any]:
    """Run a protocol; the result is JSON: accuracy with interval, the protocol, the verdicts of each problem.

    Args:
        generate: returns one completion per row of a dataset with each problem repeated `samples` times.
        problems, verdicts_of, answer_format: from a task, to replace the protocol's dataset and grader.
    """
    verdicts_of = verdicts_of or functools.partial(verdicts, grader=grader_of(protocol.grader), form=answer_format)
    problems = load_problems(protocol, limit) if problems is None else first(problems, limit)
    repeated = problems.select([i for i in range(len(problems)) for _ in range(protocol.samples)])
    started = time.perf_counter()
    completions = generate(repeated)
    right = verdicts_of(completions, repeated)
    rows = [right[i : i + protocol.samples] for i in range(0, len(right), protocol.samples)]
    answers = [stated(*pair, answer_format) for pair in zip(completions, repeated["answer"], strict=True)]
    return {
        **sampled_accuracy(rows),
        "dataset": protocol.dataset,
        "protocol": asdict(protocol),
        "answer_format": answer_format,
        "without_an_answer": sum(not each for each in answers),
        "seed": seed,
        "seconds": time.perf_counter() - started,
        "verdicts": rows,
        "versions": records.versions(),
    }


# --- engines ------------------------------------------------------------


@torch.no_grad()
def check_adapter_applied(model: PreTrainedModel | PeftModel) -> None:
    """Raise `RuntimeError` if the adapter does not change the logits: the evaluation would measure the base."""
    if not isinstance(model, PeftModel):
        return
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.arange(4, min(36, vocabulary), device=model.device).unsqueeze(0)
    model.eval()
    adapted = model(ids).logits
    with model.disable_adapter():
        base = model(ids).logits
    if torch.equal(adapted, base):
        raise RuntimeError(
            "The adapter changes no logit (untrained, or not loaded): the base would be measured. Name a trained run."
        )


def transformers_engine(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    protocol: Protocol,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = True,
) -> Callable[[Dataset], list[str]]:
    """Return `generate` for [`evaluate`] with transformers. `protocol.temperature = 0` is greedy."""
    check_adapter_applied(model)
    sampling: dict[str, Any] = {"do_sample": False}
    if protocol.temperature > 0:
        sampling = {"do_sample": True, "temperature": protocol.temperature, "top_p": protocol.top_p, "top_k": 0}
    config = GenerationConfig(max_new_tokens=protocol.max_new_tokens, **sampling)

    def generate(dataset: Dataset) -> list[str]:
        set_seed(seed)
        template = protocol.chat_template_kwargs
        return solve(model, tokenizer, dataset, protocol.max_new_tokens, batch_size, config, progress, template)

    return generate


def vllm_engine(
    model: str,
    protocol: Protocol,
    adapter: str | None = None,
    seed: int = 0,
    chat_template: str | None = None,
    **engine: Any,
) -> Callable[[Dataset], list[str]]:
    """Return `generate` for [`evaluate`] with vLLM, adapter in its LoRA slots. `engine`: arguments of `vllm.LLM`."""
    vllm = CheckpointEngine(model, adapter, seed, **engine)
    template = {"chat_template": chat_template, **(protocol.chat_template_kwargs or {})}
    ends = end_tokens(stored(vllm.generation, vllm.config, vllm.revision), vllm.tokenizer, **template)

    def generate(dataset: Dataset) -> list[str]:
        sampling = protocol.temperature, protocol.top_p, protocol.max_new_tokens, seed, ends
        asked: dict[str, Any] = {"chat_template": chat_template, "chat_template_kwargs": protocol.chat_template_kwargs}
        return vllm.chat(dataset["prompt"][:], *sampling, **asked)

    return generate


def prompt_texts(
    tokenizer: PreTrainedTokenizerBase, prompts: Iterable[list[dict]], chat_template_kwargs: dict[str, Any]
) -> list[str]:
    """Render conversations to text by the chat template, with a generation prompt."""
    return [
        str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **chat_template_kwargs))
        for prompt in prompts
    ]


@torch.no_grad()
def solve(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
    batch_size: int = 64,
    generation_config: GenerationConfig | None = None,
    progress: bool = True,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[str]:
    """Generate completions for the conversational `prompt` column of `dataset`, in its order, without noise.

    Greedy without a `generation_config`; the model's generation_config.json is ignored. Sorted by length internally.
    """
    greedy = GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens)
    generation_config = copy.deepcopy(generation_config) or greedy
    if tokenizer.pad_token is None:  # as in TRL's trainer; not saved with the tokenizer
        tokenizer = copy.copy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    generation_config.pad_token_id = tokenizer.pad_token_id
    template = chat_template_kwargs or {}
    generation_config.eos_token_id = generation_config.eos_token_id or end_tokens(model, tokenizer, **template)
    texts = prompt_texts(tokenizer, dataset["prompt"], template)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    answers: list[str] = [""] * len(texts)
    was_training = model.training
    model.eval()
    try:
        every = 0.1 if sys.stderr.isatty() else 30.0  # in a log: seconds between two lines
        starts = range(0, len(order), batch_size)
        for start in tqdm(starts, "evaluating", leave=False, mininterval=every, disable=not progress):
            rows = order[start : start + batch_size]
            padded: dict[str, Any] = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
            batch = tokenizer([texts[i] for i in rows], add_special_tokens=False, **padded).to(model.device)
            with of_the_model_alone(model):
                output = cast(Any, model).generate(  # torch types attributes of modules as tensors
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    generation_config=generation_config,
                )
            decoded = tokenizer.batch_decode(output[:, batch["input_ids"].size(1) :], skip_special_tokens=True)
            for row, text in zip(rows, decoded, strict=True):
                answers[row] = text
    finally:
        model.train(was_training)
    return answers


# --- held-out problems, answered with the rollout engine -------------------------

#: further arguments of a run with an effect on sampling
_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "max_tool_calling_iterations")


class Measurement:
    """Evaluate a trainer's policy on held-out problems: greedy answers graded, otherwise the first rewards.

    All methods but [`measured_by`] are collective. Every rank gets the results of `dataset`, in order.

    Args:
        trainer ([`QeRLGRPOTrainer`] or another trainer with [`QeRLMixin`]): trainer of the policy.
        batch_size: problems per batch, without vLLM.
    """

    def __init__(self, trainer: Any, task: Task, dataset: Dataset, batch_size: int = 64) -> None:
        self.trainer, self.task, self.dataset, self.batch_size = trainer, task, dataset, batch_size
        self.graded = task.graded(dataset)

    def verdicts(self) -> list[bool]:
        if self.graded:
            return self.task.verdicts(self.held_out_completions(), self.dataset)
        return [reward >= self.task.solved_reward for reward in self.held_out_rewards()]

    def held_out_completions(self) -> list[str]:
        """Generate greedily, noise off; with vLLM in the running engine, with the current adapter."""
        trainer, dataset = self.trainer, self.dataset
        accelerator, tokenizer = trainer.accelerator, trainer.processing_class
        limit, template = trainer.max_completion_length, trainer.chat_template_kwargs
        # contiguous, in rank order; equal (padded) shares, because gathering sharded weights is collective
        share = len(dataset) // accelerator.num_processes
        share += accelerator.process_index < len(dataset) % accelerator.num_processes
        with accelerator.split_between_processes(list(range(len(dataset))), apply_padding=True) as rows:
            if trainer.use_vllm:
                mine = dataset.select(rows[:share])
                texts = prompt_texts(tokenizer, mine["prompt"], template)
                prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
                tokens = trainer.vllm_generation.generate_greedily(prompts, limit)
                completions = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            else:
                policy = accelerator.unwrap_model(trainer.model)
                progress, mine = accelerator.is_main_process, dataset.select(rows)
                texts = solve(policy, tokenizer, mine, limit, self.batch_size, None, progress, template)
                completions = texts[:share]
        return gather_object(completions)

    @torch.no_grad()
    def held_out_rewards(self) -> list[float]:
        """Return the first reward of a completion per problem, sampled as in a rollout with tools, noise off."""
        trainer, dataset, batch_size = self.trainer, self.dataset, self.batch_size
        ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        training, generations = trainer.model.training, trainer.num_generations_eval
        trainer.model.eval()
        trainer.num_generations_eval = 1
        rewards: list[float] = []
        try:
            for start in range(0, len(dataset), batch_size * ranks):
                # equal shares, padded with the last problem
                share = min(batch_size, -(-(len(dataset) - start) // ranks))
                mine = [min(start + rank * share + i, len(dataset) - 1) for i in range(share)]
                trainer._generate_and_score_completions([dict(dataset[row]) for row in mine])
                rewards += trainer._rewards[:, 0].tolist()  # of all processes, in order
        finally:
            trainer.num_generations_eval = generations
            trainer.model.train(training)
            trainer._metrics["eval"].clear()
        return rewards[: len(dataset)]

    def measured_by(self) -> dict[str, Any]:
        """Return the settings of [`verdicts`], as JSON: verdicts with equal settings are comparable."""
        settings = run_settings(self.trainer)
        options = settings["options"]
        names = ["max_completion_length", TOKENIZER]
        names += [] if self.graded else ["temperature", "rollouts", "rollouts_sha256"]
        found: dict[str, Any] = {name: settings.get(name) for name in names}
        found |= {name: options.get(name) for name in ("chat_template_kwargs", "compute")}
        if self.graded:
            return found | self.task.graded_by()
        first, *_ = settings["rewards"]
        return {
            **found,
            **{name: options.get(name) for name in _SAMPLING},
            "reward": first,
            "reward_sha256": settings["rewards_sha256"].get(first),
            "solved_reward": self.task.solved_reward,
        }


class HeldOutAccuracy(TrainerCallback):
    """Log the accuracy after each evaluation (`eval_strategy`, `trainer.evaluate()`) as `eval_held_out_accuracy`.

    The value is in the metrics, so `metric_for_best_model="eval_held_out_accuracy"` works.
    """

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement

    def on_evaluate(self, args, state, control, metrics: dict[str, float] | None = None, **kwargs) -> None:
        verdicts = self.measurement.verdicts()
        value = {"eval_held_out_accuracy": Accuracy(sum(verdicts), len(verdicts)).value}
        if metrics is not None:
            metrics.update(value)
        self.measurement.trainer.log(value)
