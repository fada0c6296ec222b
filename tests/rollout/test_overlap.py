"""Overlap: who samples what, the numbers of the correction, resume, and what ends a run. The engine is the stand-in, in a thread."""

import contextlib
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from qerl_trl import QeRLConfig, QeRLRLOOConfig
from qerl_trl.rollout.arms import check_overlap
from qerl_trl.rollout.beside import TURN, Request, short_turns
from qerl_trl.rollout.engine import RolloutError
from qerl_trl.rollout.overlap import prompts_ahead
from tests.faults.catalog import told
from tests.faults.stand_in import StandIn, make_trainer  # noqa: F401  (a fixture)
from tests.ranks import on_ranks

#: three rollouts of two updates each
OPTIONS = {
    "overlap": 1, "max_steps": 6, "num_iterations": 2, "learning_rate": 1e-2, "aqn_num_stages": 3, "rollout_mismatch_threshold": None,
    "save_strategy": "steps", "save_steps": 1, "rollout_probe_steps": 4,
}  # fmt: skip


class Watched(StandIn):
    """Keeps of each rollout what it was sampled with, and what came."""

    def __init__(self, policy, base_fault=None):
        super().__init__(policy, base_fault)
        self.rollouts = []
        self.before = lambda number: None

    def _llm_generate(self, prompts, sampling_params, use_tqdm=False):
        self.before(len(self.rollouts))
        adapter = adapter_of(self.policy)
        outputs = super()._llm_generate(prompts, sampling_params, use_tqdm)
        assert all(torch.equal(a, b) for a, b in zip(adapter, adapter_of(self.policy), strict=True)), "put meanwhile"
        self.rollouts.append(
            SimpleNamespace(
                adapter=adapter,
                draw=self.draw,
                ahead=threading.current_thread() is not threading.main_thread(),
                call=(prompts, sampling_params),
                tokens=[output.outputs[0].token_ids for output in outputs],
                logps=[[next(iter(step.values())).logprob for step in o.outputs[0].logprobs] for o in outputs],
            )
        )
        return outputs


def adapter_of(model):
    return [parameter.detach().clone() for name, parameter in model.named_parameters() if ".lora_" in name]


class Steps(TrainerCallback):
    """The trainer's adapter before each step."""

    def __init__(self):
        self.adapters = {}

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.adapters[state.global_step] = adapter_of(model)


def logged(trainer):
    """What the run logged, but for times and memory."""
    incidental = (
        "seconds/",
        "step_time",
        "train_",
        "memory/",
        "eval_runtime",
        "eval_samples_per",
        "eval_steps_per",
        "eval_step_time",
    )
    return [{k: v for k, v in log.items() if not k.startswith(incidental)} for log in trainer.state.log_history]


@pytest.fixture
def losses(monkeypatch):
    """What TRL's loss was computed of, with the trainer's log-probabilities at that moment, and the loss."""
    seen, compute = [], GRPOTrainer._compute_loss

    def record(self, model, inputs):
        with torch.no_grad():
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            kept = inputs["completion_ids"].size(1)
            now = GRPOTrainer._get_per_token_logps_and_entropies(self, model, ids, mask, kept)[0]
        loss = compute(self, model, inputs)
        seen.append(dict(inputs) | {"now": now, "loss": loss.item(), "step": self.state.global_step})
        return loss

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", record)
    return seen


def test_a_rollout_is_sampled_by_the_adapter_of_one_rollout_earlier_and_goes_on_exactly(make_trainer, tmp_path, losses):  # noqa: F811
    trainer, steps = make_trainer(engine=Watched, **OPTIONS), Steps()
    trainer.add_callback(steps)
    trainer.train()
    engine, scaling = trainer.vllm_generation.engine, 2.0
    first, second, third = engine.rollouts
    for rollout, step in ((first, 0), (second, 0), (third, 2)):
        for mine, put in zip(steps.adapters[step], rollout.adapter, strict=True):
            # as the engine rounds it: A, or B with alpha/r in it
            assert torch.equal(put, mine.bfloat16().float()) or torch.equal(put, (mine * scaling).bfloat16() / scaling)
    assert [(rollout.draw.step, rollout.draw.sigma > 0) for rollout in (second, third)] == [(2, True), (4, True)]
    assert all(rollout.ahead for rollout in engine.rollouts)
    seeds = [parameters.seed for rollout in engine.rollouts for parameters in rollout.call[1]]
    assert len(set(seeds)) == len(seeds) == 12
    noises = [log["aqn/sigma_effective"] for log in trainer.state.log_history if "aqn/sigma_effective" in log]
    assert noises[0::2] == noises[1::2], "of the rollout in use, in both of its updates"
    assert noises[0] == 0 and noises[2] == pytest.approx(second.draw.sigma, rel=0.2) and noises[4] != noises[2]

    # the engine's adapter is the last rollout's still: asked again, it gives the same completions
    assert [o.outputs[0].token_ids for o in StandIn._llm_generate(engine, *third.call)] == third.tokens

    # decoupled PPO: pi_old is the trainer's policy when the rollout is first used, mu what the engine sampled with
    order = {tuple(tokens): number for number, tokens in enumerate(third.tokens)}
    (use, again) = [loss for loss in losses if loss["step"] in (4, 5)]
    for batch in (use, again):
        rows = [order[tuple(ids.tolist())] for ids in batch["completion_ids"]]
        mu = torch.tensor([third.logps[row] for row in rows])
        pi_old = use["now"]  # both updates take the rollout's only micro-batch
        torch.testing.assert_close(batch["sampling_per_token_logps"], mu)
        torch.testing.assert_close(batch["old_per_token_logps"], pi_old, atol=1e-5, rtol=0)
        ratio = (pi_old - mu).exp().clamp(max=trainer.vllm_importance_sampling_clip_max)
        torch.testing.assert_close(batch["importance_sampling_ratio"], ratio, atol=1e-4, rtol=1e-4)
        assert (ratio - 1).abs().max() > 0.02, "the adapter has moved, and there was noise"
    u = (again["now"] - again["old_per_token_logps"]).exp()
    assert (u - 1).abs().max() > 1e-3
    clipped = u.clamp(1 - trainer.epsilon_low, 1 + trainer.epsilon_high)
    advantages = again["advantages"][:, None]
    objective = torch.minimum(u * advantages, clipped * advantages) * again["importance_sampling_ratio"]
    assert again["loss"] == pytest.approx(-objective.mean().item(), rel=1e-3, abs=1e-5)

    # interrupted twice: at a checkpoint, and while rewards were computed
    def from_step(step, source):
        folder = tmp_path / f"from {step}"
        shutil.copytree(source / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        return make_trainer(engine=Watched, **OPTIONS | {"output_dir": str(folder), "save_steps": 100}), folder

    interrupted, folder = from_step(2, tmp_path / "run")
    score, calls = interrupted._calculate_rewards, []

    def fails(*args):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("no grader today")
        return score(*args)

    interrupted._calculate_rewards = fails
    with pytest.raises(OSError, match="no grader today") as raised:
        interrupted.train(resume_from_checkpoint=interrupted.to_resume())
    assert "Step 4 is saved" in "".join(raised.value.__notes__)
    assert [rollout.draw.step for rollout in interrupted.vllm_generation.engine.rollouts] == [4], "step 2's was stored"
    last, _ = from_step(4, folder)
    last.train(resume_from_checkpoint=last.to_resume())
    assert not last.vllm_generation.engine.rollouts, "step 4's was stored, and there is none after it"
    assert logged(last) == logged(trainer)
    for mine, theirs in zip(adapter_of(last.model), adapter_of(trainer.model), strict=True):
        assert torch.equal(mine, theirs)


def test_an_engine_that_fails_meanwhile_ends_the_run_with_its_cause(make_trainer, losses):  # noqa: F811
    options = OPTIONS | {"num_iterations": 1, "max_steps": 3, "save_steps": 100}
    trainer = make_trainer(engine=Watched, **options)

    def breaks(number):
        if number == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    trainer.vllm_generation.engine.before = breaks
    with told(RolloutError, "an illegal memory access", "at step 2", "Step 2 is saved"):
        trainer.train()
    # used within one update: its own forward has the old log-probabilities (update/passes.py)
    (batch,) = [loss for loss in losses if loss["step"] == 1]
    ratio = (
        (batch["now"] - batch["sampling_per_token_logps"]).exp().clamp(max=trainer.vllm_importance_sampling_clip_max)
    )
    torch.testing.assert_close(batch["importance_sampling_ratio"], ratio, atol=1e-4, rtol=1e-4)
    assert (ratio - 1).abs().max() > 1e-3
    again = make_trainer(engine=Watched, **options)
    again.train(resume_from_checkpoint=again.to_resume())
    assert again.state.global_step == 3 and len(again.vllm_generation.engine.rollouts) == 1


class Served(Watched):
    """Behind TRL's client of a server."""

    def trl_attributes(self):
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        return {"vllm_client": SimpleNamespace(generate=self.answer, get_server_info=lambda: info)}

    def answer(self, prompts, n, temperature, top_p, max_tokens, generation_kwargs, **others):
        """Completion i of a prompt is drawn with its seed + i, as vLLM does."""
        sampled = SimpleNamespace(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=None)
        seeds = generation_kwargs["seed"].of(len(prompts))
        rows = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(n)]
        self._llm_generate(
            rows, [SimpleNamespace(**vars(sampled) | {"seed": seed + i}) for seed in seeds for i in range(n)]
        )
        latest = self.rollouts[-1]
        logps = [[[value] for value in row] for row in latest.logps]
        return {"prompt_ids": prompts, "completion_ids": latest.tokens, "logprobs": logps}


def test_on_a_server_it_is_the_same(make_trainer):  # noqa: F811
    options = {"vllm_mode": "server", "num_iterations": 1, "max_steps": 3, "save_strategy": "no"}
    trainer, steps = make_trainer(engine=Served, **OPTIONS | options), Steps()
    trainer.add_callback(steps)
    trainer.train()
    rollouts = trainer.vllm_generation.engine.rollouts
    assert len(rollouts) == 3 and all(rollout.ahead for rollout in rollouts)
    for rollout, step in zip(rollouts, (0, 0, 1), strict=True):
        down, mine = rollout.adapter[0], steps.adapters[step][0]
        assert torch.equal(down, mine.bfloat16().float())
    assert [rollout.draw.step for rollout in rollouts[1:]] == [1, 2]


@pytest.mark.parametrize("overlap", [0, 1])
def test_on_a_server_a_run_goes_on_exactly(make_trainer, tmp_path, overlap):  # noqa: F811
    """Its own generator is in no checkpoint: of the run that goes on it is another one's. Rollouts of a step, and evaluations, draw other numbers."""
    # two rollouts per step without overlap, which has none of these
    several = {"overlap": 1} if overlap else {"overlap": 0, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    options = OPTIONS | {"vllm_mode": "server", "num_iterations": 1, "max_steps": 4, "rollout_probe_steps": 0} | several
    options |= {"eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(engine=Served, **options)
    trainer.train()
    rollouts = trainer.vllm_generation.engine.rollouts
    seeds = [parameters.seed for rollout in rollouts for parameters in rollout.call[1]]
    sampled_in_training = 4 if overlap else 8
    assert len(rollouts) > sampled_in_training and len(set(seeds)) == len(seeds)
    folder = tmp_path / "again"
    shutil.copytree(tmp_path / "run" / "checkpoint-2", folder / "checkpoint-2")
    again = make_trainer(engine=Served, **options | {"output_dir": str(folder), "save_steps": 100})
    again.vllm_generation.engine.generator.manual_seed(99)
    for _ in range(2):  # the second time by a trainer that has gone on before
        again.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert logged(again) == logged(trainer)
        for mine, theirs in zip(adapter_of(again.model), adapter_of(trainer.model), strict=True):
            assert torch.equal(mine, theirs)


def test_a_rollout_is_sampled_while_the_one_before_is_scored(make_trainer):  # noqa: F811
    trainer, asked, turns = make_trainer(engine=Watched, **OPTIONS | {"save_strategy": "no"}), threading.Event(), []
    score, engine, before = trainer._calculate_rewards, trainer.vllm_generation.engine, sys.getswitchinterval()

    def sampling(number):
        turns.append(sys.getswitchinterval())
        if number:
            asked.set()

    def slow(*args):
        last = trainer.state.global_step == 4
        assert last or asked.wait(60), "the next rollout was not asked for"
        asked.clear()
        return score(*args)

    engine.before, trainer._calculate_rewards = sampling, slow
    trainer.train()
    assert len(engine.rollouts) == 3 and turns == pytest.approx([TURN] * 3)
    assert sys.getswitchinterval() == before


def test_a_reward_that_fails_leaves_nothing_running_and_the_run_goes_on_exactly(make_trainer, tmp_path):  # noqa: F811
    whole = make_trainer(engine=Watched, **OPTIONS | {"output_dir": str(tmp_path / "whole"), "save_strategy": "no"})
    whole.train()
    options = OPTIONS | {"output_dir": str(tmp_path / "failing"), "save_steps": 100}
    trainer = make_trainer(engine=Watched, **options)
    score, engine = trainer._calculate_rewards, trainer.vllm_generation.engine
    engine.before = lambda number: time.sleep(1.0 if number == 2 else 0)

    def fails(*args):
        if trainer.state.global_step == 2:
            assert trainer.vllm_generation._next.request.is_alive()
            torch.rand(3)  # what it draws before it fails is not drawn when the run goes on
            raise OSError("no grader today")
        return score(*args)

    trainer._calculate_rewards = fails
    with pytest.raises(OSError, match="no grader today") as raised:
        trainer.train()
    assert "Step 2 is saved" in "".join(raised.value.__notes__)
    assert len(engine.rollouts) == 3 and trainer.vllm_generation._next is None
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout ahead"]
    again = make_trainer(engine=Watched, **options)
    again.train(resume_from_checkpoint=again.to_resume())
    assert [rollout.draw.step for rollout in again.vllm_generation.engine.rollouts] == [4]
    # TRL counts the tokens of a rollout when it comes, so those of the one that failed twice
    mine, theirs = ([{k: v for k, v in log.items() if k != "num_tokens"} for log in logged(t)] for t in (again, whole))
    assert mine == theirs
    for mine, theirs in zip(adapter_of(again.model), adapter_of(whole.model), strict=True):
        assert torch.equal(mine, theirs)


def test_what_was_sampled_ahead_is_looked_at_once(make_trainer):  # noqa: F811
    """When it has come. Before it is sampled there is nothing to look at."""
    trainer = make_trainer(engine=Watched, **OPTIONS | {"save_strategy": "no", "rollout_probe_steps": 0})
    engine, seen = trainer.vllm_generation.engine, []
    contents = engine.contents
    engine.contents = lambda: seen.append(len(engine.rollouts)) or contents()
    trainer.train()
    assert seen == [1, 2, 3]


def test_turns_are_short_only_inside():
    before = sys.getswitchinterval()
    with contextlib.suppress(OSError), short_turns():
        with short_turns():
            assert sys.getswitchinterval() == pytest.approx(TURN)
        assert sys.getswitchinterval() == pytest.approx(TURN)
        thread = Request(lambda: sys.getswitchinterval(), short_turns())
        assert thread.answer() == pytest.approx(TURN)
        raise OSError
    assert sys.getswitchinterval() == before


def test_an_update_that_fails_waits_for_nobody(make_trainer):  # noqa: F811
    trainer = make_trainer(engine=Watched, overlap=1, max_steps=3)
    release = threading.Event()
    trainer.vllm_generation.engine.before = lambda number: number == 1 and release.wait(60)

    class Fails(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            raise ArithmeticError("the optimizer")

    trainer.add_callback(Fails())
    began = time.monotonic()
    with pytest.raises(ArithmeticError, match="the optimizer"):
        trainer.train()
    assert time.monotonic() - began < 30
    pending = trainer.vllm_generation._next.request
    assert pending.is_alive() and pending.daemon
    release.set()
    # whoever wants the engine waits for it first
    trainer.vllm_generation.generate_greedily([[5, 6, 7]], 2)
    assert not pending.is_alive()


def test_a_request_ends_with_the_interpreter():
    def for_ever():
        while True:
            time.sleep(0.01)

    request = Request(for_ever, contextlib.nullcontext())
    request.stop()
    assert not request.is_alive()
    with pytest.raises(SystemExit):
        request.answer()


def test_two_processes_sample_ahead_each_with_its_own_engine_and_resume_exactly(make_trainer, tmp_path):  # noqa: F811
    def run(folder, resume=None, **options):
        def work(rank):
            torch.set_num_threads(1)
            trainer, steps = make_trainer(engine=Watched, **OPTIONS | {"output_dir": str(folder)} | options), Steps()
            trainer.add_callback(steps)
            trainer.train(resume_from_checkpoint=resume)
            return {
                "adapters": {step: [t.numpy() for t in found] for step, found in steps.adapters.items()},
                "put": [[t.numpy() for t in rollout.adapter] for rollout in trainer.vllm_generation.engine.rollouts],
                "ahead": [rollout.ahead for rollout in trainer.vllm_generation.engine.rollouts],
                "draws": [rollout.draw for rollout in trainer.vllm_generation.engine.rollouts],
                "tokens": [rollout.tokens for rollout in trainer.vllm_generation.engine.rollouts],
                "end": [t.numpy() for t in adapter_of(trainer.model)],
            }

        outcomes = on_ranks(2, work, 200)
        for outcome in outcomes:
            assert isinstance(outcome.answer, dict), outcome
        return [outcome.answer for outcome in outcomes]

    def same(some, others):
        return all((one == other).all() for one, other in zip(some, others, strict=True))

    both = run(tmp_path / "whole")
    first, second = both
    assert first["ahead"] == second["ahead"] == [True] * 3
    assert first["draws"] == second["draws"] and first["tokens"] != second["tokens"]
    assert all(same(first["adapters"][step], second["adapters"][step]) for step in range(6))
    for found in both:  # each rollout by the adapter of one rollout earlier
        for put, step in zip(found["put"], (0, 0, 2), strict=True):
            rounded = [torch.from_numpy(mine).bfloat16() for mine in found["adapters"][step]]
            halves = [(2 * torch.from_numpy(mine)).bfloat16() / 2 for mine in found["adapters"][step]]
            put = [torch.from_numpy(tensor) for tensor in put]
            assert all(
                torch.equal(one, a.float()) or torch.equal(one, b.float())
                for one, a, b in zip(put, rounded, halves, strict=True)
            )
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    resumed = run(tmp_path / "again", str(tmp_path / "again" / "checkpoint-2"))
    assert all(same(found["end"], whole["end"]) for found, whole in zip(resumed, both, strict=True))
    assert [found["tokens"][-1] for found in resumed] == [found["tokens"][-1] for found in both]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("resumed", [0, 3, 4])
def test_prompts_are_looked_ahead_as_the_data_loader_gives_them(processes, resumed):
    """Two epochs of four rollouts, each of two micro-batches and two iterations, that is of two updates of two micro-batches."""
    data = Dataset.from_dict({"prompt": [f"prompt {number}" for number in range(33)]})

    def sampler():
        sampler = RepeatSampler(data, mini_repeat_count=2, batch_size=8, repeat_count=4, seed=3)
        for _ in range(resumed // 4):
            next(iter(sampler))
        return sampler

    for process in range(processes):
        accelerator = SimpleNamespace(
            num_processes=processes, process_index=process, split_batches=False, even_batches=True
        )
        trainer = SimpleNamespace(
            args=SimpleNamespace(
                steps_per_generation=2, gradient_accumulation_steps=2, dataloader_drop_last=False, ignore_data_skip=False
            ),
            num_iterations=2, accelerator=accelerator, _train_batch_size=8 // processes, train_dataset=data, _get_train_sampler=sampler,
            state=SimpleNamespace(global_step=2 * resumed),
        )  # fmt: skip
        loader = DataLoader(data, batch_size=16 // processes, sampler=sampler(), collate_fn=lambda rows: rows)
        loader = prepare_data_loader(loader, num_processes=processes, process_index=process, put_on_device=False)
        batches = [batch for _ in range(2) for batch in loader]
        assert len(batches) == 2 * 4 * 4
        expected = [[row["prompt"] for row in batch] for batch in batches[::4]]
        ahead = prompts_ahead(trainer)
        for prompts in expected[resumed % 4 + 1 :]:
            assert next(ahead) == prompts


NOT = {
    "neither 0 nor 1": {"overlap": 2},
    "use_vllm=False": {"use_vllm": False},
    "vllm_enable_sleep_mode=True": {"vllm_enable_sleep_mode": True},
    "vllm_tensor_parallel_size=2": {"vllm_tensor_parallel_size": 2},
    "vllm_importance_sampling_correction=False": {"vllm_importance_sampling_correction": False},
    "entropy_target": {"aqn_schedule": "entropy_target", "aqn_entropy_target": 1.0},
    "rollouts of 2 backward passes": {"steps_per_generation": 2, "gradient_accumulation_steps": 4},
}


@pytest.mark.parametrize(("named", "options"), NOT.items(), ids=list(NOT))
def test_settings_that_cannot_work_are_refused(named, options):
    common = {"output_dir": "unused", "use_cpu": True, "bf16": False, "use_vllm": True, "vllm_mode": "colocate"}
    with pytest.raises(ValueError, match=f"overlap.*{named}"):
        QeRLConfig(**common | {"overlap": 1} | options)
    QeRLConfig(**common | options | {"overlap": 0})


def test_rloo_is_refused():
    with pytest.raises(ValueError, match="overlap=1 cannot work with RLOO"):
        QeRLRLOOConfig("unused", use_cpu=True, bf16=False, use_vllm=True, overlap=1)


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ("rollout_func", {"rollout_func": print}),
        ("tools", {"tools": [print]}),
        ("environment_factory", {"environment_factory": dict}),
        ("IterableDataset", {"train_dataset": Dataset.from_dict({"prompt": ["a"]}).to_iterable_dataset()}),
        ("pictures", {"train_dataset": Dataset.from_dict({"prompt": ["a"], "image": ["b"]})}),
    ],
)
def test_trainers_that_cannot_look_ahead_are_refused(named, given):
    args = SimpleNamespace(overlap=1)
    with pytest.raises(ValueError, match=f"overlap=1 cannot .*{named}"):
        check_overlap(args, given)
    check_overlap(SimpleNamespace(overlap=0), given)
