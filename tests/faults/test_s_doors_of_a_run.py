"""What a run is made of, by doors that a script of one's own opens: what it samples with, what grades, what is trained on, what is loaded.

Each case passed silently when it was written.
"""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

import qerl_trl
from qerl_trl import QeRLConfig, QeRLGRPOTrainer
from qerl_trl.checkpoint import seal
from qerl_trl.run.resume import REFERENCE_NAME
from tests.faults.catalog import fault, told
from tests.faults.test_r7_publish import _commit
from tests.faults.test_s_identity import other_base, trained  # noqa: F401  (fixtures)
from tests.faults.test_s_products import flip_a_bit
from tests.faults.tiny_runs import PROMPTS, WEIGHTS, AfterTheFirstStep, Interrupted, spread_reward, tiny_runs  # noqa: F401

# --- what it samples with ---------------------------------------------------------------------------------------------------------


@fault("S.noise_uncorrected_in_transformers", remedy=None, recovered=True)
def test_what_the_models_own_file_adds_does_not_act(tiny_runs, tiny_tokenizer, tmp_path, monkeypatch):  # noqa: F811
    """`generate` takes what TRL leaves open from generation_config.json: tokens that the policy gives every chance were never sampled."""
    base = Path(shutil.copytree(tiny_runs.model, tmp_path / "base"))
    own = json.loads((base / "generation_config.json").read_text())
    own |= {"suppress_tokens": list(range(2, 200)), "no_repeat_ngram_size": 1, "min_p": 0.9}
    (base / "generation_config.json").write_text(json.dumps(own))
    sampled, said = {}, []
    monkeypatch.setattr("qerl_trl.rollout.sampling.logger.warning_once", lambda text, *args: said.append(text % args))
    for folder in (tiny_runs.model, base):
        monkeypatch.setattr(tiny_runs, "model", str(folder))
        rows = sampled.setdefault(str(folder), [])

        def reward(completions, completion_ids, rows=rows, **kwargs):
            rows.extend(completion_ids)
            return spread_reward(completions)

        trainer = tiny_runs.trainer(
            tmp_path / Path(folder).name, reward=reward, save_strategy="no", max_completion_length=16
        )
        trainer.train()
    assert sampled[str(base)] == sampled[str(folder)] == next(iter(sampled.values())) != []
    assert "suppress_tokens=" in said[0] and "min_p=0.9" in said[0] and "generation_kwargs" in said[0]
    kept = trainer.model.get_base_model().generation_config
    assert kept.no_repeat_ngram_size == 1, "what is exported has the model's own file"


# --- what grades ------------------------------------------------------------------------------------------------------------------


def of_numbers(form):
    def graded(completions, **kwargs):
        values = [float(index) for index, _ in enumerate(completions)]
        return form(values)

    return graded


@fault("R5.not_a_number")
@pytest.mark.parametrize(
    "form", [lambda v: dict(enumerate(v)), set, lambda v: dict(enumerate(v)).keys()], ids=["dict", "set", "keys"]
)
def test_rewards_without_an_order(form, tiny_runs, tmp_path):  # noqa: F811
    """As many as there are completions: keys were learned from."""
    trainer = tiny_runs.trainer(tmp_path / "run", reward=of_numbers(form), max_steps=1)
    with told(TypeError, "'graded' returned", "a list with one number"):
        trainer.train()
    assert trainer.state.global_step == 0


# --- what is trained on -----------------------------------------------------------------------------------------------------------


class Decreasing(TrainerCallback):
    """The first checkpoint is the best one; then `action`."""

    def __init__(self, action=lambda: None):
        self.action = action

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_reward"] = -float(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.action()


def trained_with_the_best_kept(tiny_runs, folder, action=lambda: None):  # noqa: F811
    trainer = tiny_runs.trainer(
        folder, max_steps=3, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, metric_for_best_model="reward",
        greater_is_better=True, eval_on_start=False, do_eval=True,
    )  # fmt: skip
    trainer.eval_dataset = PROMPTS.select(range(4))
    trainer.add_callback(Decreasing(action))
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.fixture
def with_evaluation(monkeypatch):
    """Trainers are made with data to evaluate on."""
    made = QeRLGRPOTrainer.__init__

    def make(self, *args, **kwargs):
        made(self, *args, **{"eval_dataset": PROMPTS.select(range(4)), **kwargs})

    monkeypatch.setattr(QeRLGRPOTrainer, "__init__", make)


@fault("S.finished_run_again")
def test_the_best_weights_are_not_recorded_as_the_last(with_evaluation, tiny_runs, tmp_path):  # noqa: F811
    trained_with_the_best_kept(tiny_runs, tmp_path / "run")
    weights = (tmp_path / "run" / WEIGHTS).read_bytes()
    assert weights == (tmp_path / "run/checkpoint-1" / WEIGHTS).read_bytes()
    assert seal.recorded_run(tmp_path / "run")["changed"] == ["weights: those of checkpoint-1 (load_best_model_at_end)"]
    assert "changed" not in seal.recorded_run(tmp_path / "run/checkpoint-3")


@fault("R6.bit_flip", recovered=True)
def test_a_damaged_best_checkpoint_is_not_loaded(with_evaluation, tiny_runs, tmp_path, caplog):  # noqa: F811
    """The weights stay those of the last step, and are recorded as such."""
    trained_with_the_best_kept(tiny_runs, tmp_path / "run", lambda: flip_a_bit(tmp_path / "run/checkpoint-1", WEIGHTS))
    assert "checkpoint-1 is damaged" in caplog.text and "those of the last step" in caplog.text
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == (tmp_path / "run/checkpoint-3" / WEIGHTS).read_bytes()
    assert "changed" not in seal.recorded_run(tmp_path / "run")


@fault("S.prompt_longer_than_model")
def test_tokens_that_the_model_does_not_have(tiny_runs, tmp_path, monkeypatch):  # noqa: F811
    """It was an IndexError, and on a GPU an assertion of the device."""
    tokenizer = copy.deepcopy(tiny_runs.tokenizer)
    tokenizer.add_tokens([f"<extra{number}>" for number in range(200)])
    monkeypatch.setattr(tiny_runs, "tokenizer", tokenizer)
    known = len(tokenizer) - 1
    data = Dataset.from_dict({"prompt": ["say one ", "<extra199> say "]})
    with told(ValueError, f"the token {known}", "knows 320 tokens", "the model's own tokenizer"):
        tiny_runs.trainer(tmp_path / "run", dataset=data)


# --- what is loaded ---------------------------------------------------------------------------------------------------------------


@fault("R6.missing_tensors")
@pytest.mark.parametrize(
    ("edit", "words"), [("half", ("lacks", "whole checkpoint")), ("nan", ("NaN or infinite", WEIGHTS))]
)
def test_a_part_of_an_adapter_without_a_seal_is_not_gone_on_from(edit, words, tiny_runs, tmp_path):  # noqa: F811
    """A checkpoint of another trainer, named explicitly; PEFT fills what is missing with random numbers."""
    tiny_runs.trainer(tmp_path / "run", max_steps=1).train()
    foreign = Path(shutil.copytree(tmp_path / "run/checkpoint-1", tmp_path / "foreign"))
    (foreign / seal.MANIFEST_NAME).unlink()
    tensors = load_file(foreign / WEIGHTS)
    if edit == "half":
        tensors = {name: tensors[name] for name in sorted(tensors)[::2]}
    else:
        next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, foreign / WEIGHTS, {"format": "pt"})
    trainer = tiny_runs.trainer(tmp_path / "on", max_steps=2)
    with told(ValueError, str(foreign), *words):
        trainer.train(resume_from_checkpoint=str(foreign))
    assert trainer.state.global_step == 0


@fault("S.wrong_base")
@pytest.mark.parametrize("fault_is", ["another base", "another bit"])
def test_a_published_adapter_by_its_hub_id(fault_is, trained, other_base, tiny_model_dir, tmp_path, monkeypatch):  # noqa: F811
    """Compared with what was published beside it, as a folder is."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    _commit(tmp_path / "hub", "someone/adapter", "a" * 40, trained[1])
    own = tiny_model_dir("qwen2")
    qerl_trl.load_adapter(qerl_trl.from_pretrained(own, dtype=torch.float32), "someone/adapter")
    if fault_is == "another base":
        model = qerl_trl.from_pretrained(other_base, dtype=torch.float32)
        with told(ValueError, "someone/adapter", "a base with other weights", "allow_other_base=True"):
            qerl_trl.load_adapter(model, "someone/adapter")
        return
    flip_a_bit(tmp_path / "hub/models--someone--adapter/snapshots" / ("a" * 40), WEIGHTS)
    with told(ValueError, "someone/adapter is not as it was sealed", WEIGHTS, "download it again"):
        qerl_trl.load_adapter(qerl_trl.from_pretrained(own, dtype=torch.float32), "someone/adapter")


@fault("S.run_folder_edited")
def test_an_edited_adapter_is_not_loaded_by_hand(trained, tiny_model_dir, tmp_path):  # noqa: F811
    run = Path(shutil.copytree(trained[1], tmp_path / "run"))
    flip_a_bit(run, WEIGHTS)
    model = qerl_trl.from_pretrained(tiny_model_dir("qwen2"), dtype=torch.float32)
    with told(ValueError, str(run), "is not as it was sealed", "Copy or download it again"):
        qerl_trl.load_adapter(model, run)


# --- the reference model ----------------------------------------------------------------------------------------------------------


def all_trained(tiny_runs, folder, **options):  # noqa: F811
    """TRL moves the reference towards the policy after each step."""
    fields = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4, "num_generations": 4,
        "max_completion_length": 4, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2, "report_to": "none",
        "gradient_checkpointing": False, "disable_tqdm": True, "model_init_kwargs": {"dtype": "float32"}, "base_format": "full", "aqn": False,
        "beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5,
    }  # fmt: skip
    args = QeRLConfig(**{**fields, **options})
    return QeRLGRPOTrainer(tiny_runs.model, spread_reward, args, PROMPTS, processing_class=tiny_runs.tokenizer)


@fault("R6.resume_on_boundary", remedy=None, recovered=True)
def test_a_reference_that_moves_is_gone_on_with(tiny_runs, tmp_path, caplog):  # noqa: F811
    """It was the first one again, and the run another one."""
    whole = all_trained(tiny_runs, tmp_path / "whole")
    whole.train()
    first = all_trained(tiny_runs, tmp_path / "run")
    first.add_callback(AfterTheFirstStep())
    with pytest.raises(Interrupted):
        first.train()
    shutil.copytree(tmp_path / "run/checkpoint-1", tmp_path / "without")
    second = all_trained(tiny_runs, tmp_path / "run")
    second.train(resume_from_checkpoint=True)
    for name in ("model", "ref_model"):
        pairs = zip(getattr(whole, name).named_parameters(), getattr(second, name).named_parameters(), strict=True)
        assert all(torch.equal(a, b) for (_, a), (_, b) in pairs), name
    (tmp_path / "without" / REFERENCE_NAME).unlink()
    seal.seal(tmp_path / "without", seal.recorded_run(tmp_path / "without"))
    all_trained(tiny_runs, tmp_path / "on").train(resume_from_checkpoint=str(tmp_path / "without"))
    assert f"without has no {REFERENCE_NAME}" in caplog.text
