"""Accuracy on problems with one final answer: greedy or sampled, noise off, with confidence intervals.

`qerl-trl eval` runs the paper's protocol (Section 4: temperature 0.6, top-p 0.95, at most 4096 new tokens) on its benchmarks, with
transformers or vLLM. An adapter is checked to change the model's output before anything is measured; an answer counts when the protocol's
grader (grading.py) finds the *whole* stated answer (the last `#### ...` or `\\boxed{...}`) equal to the reference.
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
from datasets import Dataset
from peft import PeftModel
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..checkpoint import records
from ..rollout.sampling import end_tokens, of_the_model_alone, stored
from ..rollout.vllm.plugin import CheckpointEngine
from ..run import banner
from .data import ANSWERS, first, from_hub, is_saved, read, split_named, with_prompts
from .grading import Grader, final_answer, grader_of, is_correct

_Z95 = 1.959963984540054
BOXED_PROMPT = "Solve the problem step by step. Put the final answer in \\boxed{}."
GSM8K_PROMPT = "Solve the problem step by step. Put the final answer on the last line, in the form: #### number"


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
        return {
            "correct": self.correct,
            "total": self.total,
            "accuracy": self.value,
            "interval95": list(self.interval),
        }

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} % [{100 * low:.1f}, {100 * high:.1f}] ({self.correct} of {self.total})"


def paired_difference(before: Iterable[bool], after: Iterable[bool]) -> tuple[float, float, float]:
    """Mean change in accuracy on the same problems with its 95 % interval (normal approximation of paired differences; where all changed alike, or none
    did, that of Agresti and Min, Statistics in Medicine 2005, with half a problem more of each kind).

    Returns:
        `(difference, low, high)`, as fractions.
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
    """Accuracy over several completions per problem, with a 95 % interval that takes problems, not completions, as independent.

    Args:
        correct: for each problem, whether each of its completions is correct.
    """
    shares = [sum(row) / len(row) for row in correct]
    n, samples = len(shares), len(correct[0])
    if samples == 1:
        return Accuracy(sum(row[0] for row in correct), n).as_dict()
    mean = sum(shares) / n
    variance = sum((share - mean) ** 2 for share in shares) / max(n - 1, 1)
    half = _Z95 * math.sqrt(variance / n)
    interval = [max(0.0, mean - half), min(1.0, mean + half)]
    if (
        len({sum(row) for row in correct}) == 1
    ):  # problems that all went alike say no more than as many of one completion each
        interval = list(Accuracy(round(mean * n), n).interval)
    return {"correct": sum(map(sum, correct)), "total": n, "accuracy": mean, "interval95": interval}


# --- protocols --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """A benchmark and how it is run. `samples`: completions per problem (more for the small sets, ours). `grader`: see grading.py.
    `chat_template_kwargs`: for the chat template, such as `{"enable_thinking": False}`."""

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
    "gsm8k": Protocol("openai/gsm8k", "main", system_prompt=GSM8K_PROMPT),
    "math500": Protocol("HuggingFaceH4/MATH-500"),
    "amc23": Protocol("math-ai/amc23", samples=8),
    "aime24": Protocol("HuggingFaceH4/aime_2024", split="train", samples=8),
    "aime25": Protocol("math-ai/aime25", samples=8),
}


def load_problems(protocol: Protocol, limit: int | None = None) -> Dataset:
    """The benchmark with a conversational `prompt` and an `answer` column.

    `protocol.dataset` is a Hub id, a file, or a folder with `<split>.jsonl`, of any kind that a task's data may have.

    Raises:
        `ValueError`: no column that holds questions or answers.
    """
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
    """Run a protocol. `generate` gives one completion for each row of a dataset whose problems are repeated `samples` times.

    Args:
        problems, verdicts_of, answer_format: of a task ([`task.Task`]), instead of the protocol's dataset and grader.

    Returns:
        A JSON-able result: accuracy with interval, the protocol, and for each problem the completions' verdicts.
    """
    verdicts_of = verdicts_of or functools.partial(
        grade, grader=grader_of(protocol.grader), whole=answer_format == "whole"
    )
    problems = load_problems(protocol, limit) if problems is None else first(problems, limit)
    repeated = problems.select([i for i in range(len(problems)) for _ in range(protocol.samples)])
    started = time.perf_counter()
    completions = generate(repeated)
    verdicts = verdicts_of(completions, repeated)
    whole = {
        "answer_format": answer_format,
        "without_an_answer": 0 if answer_format == "whole" else sum(not final_answer(text) for text in completions),
    }
    rows = [verdicts[i : i + protocol.samples] for i in range(0, len(verdicts), protocol.samples)]
    return {
        **sampled_accuracy(rows),
        "dataset": protocol.dataset,
        "protocol": asdict(protocol),
        **whole,
        "seed": seed,
        "seconds": time.perf_counter() - started,
        "verdicts": rows,
        "versions": banner.versions(),
    }


# --- engines ----------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_adapter_applied(model: PreTrainedModel | PeftModel) -> None:
    """Refuse an adapter that changes nothing: evaluating it would measure the base.

    Raises:
        `RuntimeError`: the logits are the same with and without it.
    """
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
            "The adapter changes no logit: it is untrained, or did not load. An evaluation would measure the base model."
        )


def transformers_engine(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    protocol: Protocol,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = True,
) -> Callable[[Dataset], list[str]]:
    """`generate` for [`evaluate`] by transformers. `protocol.temperature = 0` is greedy."""
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
    """`generate` for [`evaluate`] by vLLM, the adapter in vLLM's own LoRA slots.

    Args:
        model: folder or Hub id of a bf16 or NVFP4 checkpoint.
        chat_template: instead of the model's own.
        engine: further arguments of `vllm.LLM`.

    Raises:
        `ImportError`: vLLM is not installed. `RuntimeError`: the adapter changes no log-probability.
        `ValueError`: its rank is larger than vLLM's slots.
    """
    try:
        vllm = CheckpointEngine(model, adapter, seed, **engine)
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ImportError(
            "vLLM is not installed: pip install 'qerl-trl[vllm]', or use --engine transformers."
        ) from error
    template = {"chat_template": chat_template, **(protocol.chat_template_kwargs or {})}
    ends = end_tokens(stored(vllm.generation, vllm.config, vllm.revision), vllm.tokenizer, **template)

    def generate(dataset: Dataset) -> list[str]:
        return vllm.chat(
            dataset["prompt"][:],
            protocol.temperature,
            protocol.top_p,
            protocol.max_new_tokens,
            seed,
            ends,
            chat_template=chat_template,
            chat_template_kwargs=protocol.chat_template_kwargs,
        )

    return generate


def prompt_texts(
    tokenizer: PreTrainedTokenizerBase, prompts: Iterable[list[dict]], chat_template_kwargs: dict[str, Any]
) -> list[str]:
    """The conversations as the model reads them, ready for its answer."""
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
    """Completions for the conversational `prompt` column of `dataset`, in its order.

    Greedy unless a `generation_config` says otherwise; what the model's own generation_config.json adds does not act. The model is put into evaluation mode, where no noise acts, and back.

    Args:
        max_new_tokens: length limit of a completion, in tokens.
        batch_size: prompts generated for at a time; sorted by length inside so that padding stays small.
    """
    generation_config = copy.deepcopy(generation_config) or GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens
    )
    if tokenizer.pad_token is None:  # as TRL's trainer does; not in a tokenizer that is written later
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
        for start in tqdm(
            range(0, len(order), batch_size), "evaluating", leave=False, mininterval=every, disable=not progress
        ):
            rows = order[start : start + batch_size]
            batch = tokenizer(
                [texts[i] for i in rows],
                return_tensors="pt",
                padding=True,
                padding_side="left",
                add_special_tokens=False,
            ).to(model.device)
            with of_the_model_alone(model):
                output = cast(Any, model).generate(  # torch types a module's attributes as tensors
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


def grade(completions: list[str], dataset: Dataset, grader: str | Grader = "auto", whole: bool = False) -> list[bool]:
    """Whether each completion states the dataset's `answer`, as `grader` compares (grading.py); `whole`: whether it is the answer as a whole."""
    compare = grader_of(grader) if isinstance(grader, str) else grader
    return [is_correct(text, gold, compare, whole) for text, gold in zip(completions, dataset["answer"], strict=True)]
