"""Held-out problems, answered greedily by the policy that is being trained, where its rollouts are generated.

With `use_vllm` that is the running engine, which has the KV cache for it: adapter as it is at this moment, noise off. Without, it is
transformers' `generate`. Every process answers its share.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import TrainerCallback

from ..checkpoint.settings import run_settings
from .evaluation import Accuracy, grade, prompt_texts, solve
from .task import Task

#: further arguments of a run by which a completion is sampled
_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "max_tool_calling_iterations")


def held_out_completions(
    trainer: Any, dataset: Dataset, max_new_tokens: int | None = None, batch_size: int = 64
) -> list[str]:
    """Greedy completions for the conversational `prompt` column of `dataset`, in its order, on every process. Collective.

    Args:
        trainer ([`QeRLGRPOTrainer`] or another trainer with our mixin): before, during or after training.
        max_new_tokens: length limit of a completion in tokens; the trainer's `max_completion_length` by default.
        batch_size: problems at a time in transformers; the engine takes them all and schedules by itself.
    """
    accelerator, tokenizer = trainer.accelerator, trainer.processing_class
    limit = max_new_tokens or trainer.max_completion_length
    template = trainer.chat_template_kwargs
    # contiguous, in rank order; each process gets as many, where there are no more its last one again, because sharded weights are gathered together
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
            completions = solve(
                policy, tokenizer, mine, limit, batch_size, progress=progress, chat_template_kwargs=template
            )[:share]
    return gather_object(completions)


@torch.no_grad()
def held_out_rewards(trainer: Any, dataset: Dataset, batch_size: int = 64) -> list[float]:
    """The first reward of one completion for each row of `dataset`, in its order, on every process. Collective.

    Sampled as in a rollout of the run, tools and environments included, but without noise: what has several turns is played by the
    trainer, whose loop it is.
    """
    ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    training, generations = trainer.model.training, trainer.num_generations_eval
    trainer.model.eval()
    trainer.num_generations_eval = 1
    rewards: list[float] = []
    try:
        for start in range(0, len(dataset), batch_size * ranks):
            # each process gets as many, the last one again where there are no more
            share = min(batch_size, -(-(len(dataset) - start) // ranks))
            mine = [min(start + rank * share + i, len(dataset) - 1) for i in range(share)]
            trainer._generate_and_score_completions([dict(dataset[row]) for row in mine])
            rewards += trainer._rewards[:, 0].tolist()  # of all processes, in their order
    finally:
        trainer.num_generations_eval = generations
        trainer.model.train(training)
        trainer._metrics["eval"].clear()
    return rewards[: len(dataset)]


def held_out_verdicts(trainer: Any, task: Task, dataset: Dataset, batch_size: int = 64) -> list[bool]:
    """Which of the held-out problems the policy solves now: its greedy answers graded, or the first reward where nothing can be."""
    if task.graded(dataset):
        return task.verdicts(held_out_completions(trainer, dataset, batch_size=batch_size), dataset)
    return [reward >= task.solved_reward for reward in held_out_rewards(trainer, dataset, batch_size)]


def measured_by(trainer: Any, task: Task, dataset: Dataset) -> dict[str, Any]:
    """All by which [`held_out_verdicts`] comes to its verdicts, as JSON, beside the policy and the problems: verdicts can be compared where it is the same."""
    settings = run_settings(trainer)
    options = settings["options"]
    found: dict[str, Any] = {name: settings.get(name) for name in ("max_completion_length", "tokenizer_content_sha256")}
    found["chat_template_kwargs"] = options.get("chat_template_kwargs")
    if task.graded(dataset):
        return found | task.graded_by()
    first, *_ = settings["rewards"]
    sampled = {name: settings.get(name) for name in ("temperature", "rollouts", "rollouts_sha256")}
    return {
        **found,
        **sampled,
        **{name: options.get(name) for name in _SAMPLING},
        "reward": first,
        "reward_sha256": settings["rewards_sha256"].get(first),
        "solved_reward": task.solved_reward,
    }


class HeldOutAccuracy(TrainerCallback):
    """After each evaluation (`eval_strategy`, or `trainer.evaluate()`): greedy accuracy on `dataset`, as `eval_held_out_accuracy`.

    It stands in the metrics of the evaluation, so `metric_for_best_model="eval_held_out_accuracy"` works.

    Args:
        trainer: the trainer that this callback is added to.
        dataset: with a conversational `prompt` column, and whatever `grade` reads.
        grade: whether each completion is correct; by default against the column `answer`.
        measure: which problems are solved, instead of `grade`: what [`held_out_verdicts`] says of a task.
    """

    def __init__(
        self,
        trainer: Any,
        dataset: Dataset,
        grade: Callable[[list[str], Dataset], list[bool]] = grade,
        batch_size: int = 64,
        measure: Callable[[], list[bool]] | None = None,
    ) -> None:
        self.trainer, self.dataset, self.grade, self.batch_size = trainer, dataset, grade, batch_size
        self.measure = measure or self._graded

    def on_evaluate(self, args, state, control, metrics: dict[str, float] | None = None, **kwargs) -> None:
        verdicts = self.measure()
        value = {"eval_held_out_accuracy": Accuracy(sum(verdicts), len(verdicts)).value}
        if metrics is not None:
            metrics.update(value)
        self.trainer.log(value)

    def _graded(self) -> list[bool]:
        return self.grade(held_out_completions(self.trainer, self.dataset, batch_size=self.batch_size), self.dataset)
