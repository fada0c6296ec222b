"""A plugin for TRL's own tests (`-p peers_plugin`): our trainer and configuration in place of TRL's, outcomes recorded.

Started by run.py; imports nothing of our tests, because TRL's package of tests is called `tests` too.

    QERL_PEERS_ARM      stock (TRL's own), full, nvfp4
    QERL_PEERS_RESULT   JSON lines to write: test, outcome, message
"""

import json
import linecache
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import peft
import pytest
import torch
import trl
from run import ASKED_OF_THE_ADAPTER
from stand_ins import small_id
from trl import import_utils

assert not Path(trl.__file__).is_relative_to(Path.cwd()), f"{trl.__file__} is the checkout's, not the installed TRL"

_ARM = os.environ["QERL_PEERS_ARM"]
_RESULT = Path(os.environ["QERL_PEERS_RESULT"])
#: the latest trainer of the test, and whether a frozen weight was exempt from the test's question
_latest: dict = {}

_PROMPTS = {"train": ["What is red?", "What comes after one?", "Say north."], "test": ["What is blue?", "Say south."]}


def _load_dataset(name: str, config: str | None = None, split: str | None = None, streaming: bool = False):
    """A few prompts in the columns of TRL's data sets."""
    if name != "trl-internal-testing/zen" or config not in ("standard_prompt_only", "conversational_prompt_only"):
        pytest.skip(f"no stand-in for {name}, {config}")
    made: dict = {}
    for part, prompts in _PROMPTS.items():
        talk = [[{"role": "user", "content": prompt}] for prompt in prompts]
        made[part] = datasets.Dataset.from_dict({"prompt": prompts if config == "standard_prompt_only" else talk})
    if streaming:
        made = {key: value.to_iterable_dataset() for key, value in made.items()}
        return made[split] if split else datasets.IterableDatasetDict(made)
    return made[split] if split else datasets.DatasetDict(made)


#: instead of 3: as many steps as it takes to move both factors of an adapter
_EPOCHS = 1


def _known(made: type, of: type) -> type:
    """`made` under the name of `of`, where pickle finds it."""
    made.__name__ = made.__qualname__ = of.__name__
    globals()[of.__name__] = made
    return made


def _shorter(config: type) -> type:
    """TRL's own configuration, with fewer epochs."""

    @dataclass
    class Config(config):
        num_train_epochs: float = _EPOCHS

    return _known(Config, config)


datasets.load_dataset = _load_dataset
for _absent in ("is_joblib_available",):  # asked by helpers of a checkout that is older than the installed TRL
    vars(import_utils).setdefault(_absent, lambda: False)


def _in_place_of(trainer: type, config: type) -> tuple[type, type]:
    chosen, dense = ("full", None) if _ARM == "full" else ("nvfp4", ["experts"])

    @dataclass(repr=False)
    class Config(config):
        base_format: str = chosen
        aqn: bool = False
        num_train_epochs: float = _EPOCHS
        # as the error of a mixture of experts advises
        modules_to_not_convert: list[str] | None = field(default_factory=lambda: dense)

    class Trainer(trainer):
        _config_class = Config

        def __init__(self, model, reward_funcs=None, args=None, *positional, **kwargs):
            if _ARM == "full" and (kwargs.get("peft_config") or isinstance(model, peft.PeftModel)):
                args.base_format = "bf16"  # "full" is the arm without an adapter
            super().__init__(model, reward_funcs, args, *positional, **kwargs)

        def train(self, *args, **kwargs):
            self.about_to_train = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}
            _latest["trainer"] = self
            return super().train(*args, **kwargs)

    return _known(Trainer, trainer), _known(Config, config)


if _ARM == "stock":
    trl.GRPOConfig, trl.RLOOConfig = _shorter(trl.GRPOConfig), _shorter(trl.RLOOConfig)
else:
    import qerl_trl

    trl.GRPOTrainer, trl.GRPOConfig = _in_place_of(qerl_trl.QeRLGRPOTrainer, qerl_trl.QeRLConfig)
    trl.RLOOTrainer, trl.RLOOConfig = _in_place_of(qerl_trl.QeRLRLOOTrainer, qerl_trl.QeRLRLOOConfig)


def _moves_later(trainer, name: str) -> bool:
    """After one step: the gradient of an adapter's A is zero while B is."""
    return trainer.state.global_step == 1 and "lora_A" in name


def _may_stand_still(weight: torch.Tensor) -> bool:
    """Whether our trainer may leave a weight as it was that a test wants changed: what is frozen, or moves later."""
    trainer = _latest.get("trainer")
    if _ARM in ("stock", "full") or trainer is None:
        return False
    name = next((name for name, parameter in trainer.model.named_parameters() if parameter is weight), None)
    return name is not None and (not weight.requires_grad or _moves_later(trainer, name))


def _still() -> list[str]:
    """What was to be trained and has not moved."""
    trainer = _latest["trainer"]
    now, before = dict(trainer.model.named_parameters()), trainer.about_to_train.items()
    same = [name for name, value in before if torch.equal(value, now[name].to(value.device))]
    return [name for name in same if not _moves_later(trainer, name)]


class _Torch:
    """torch for the test modules: ids of Qwen's vocabulary that a test writes out become those of the stand-ins."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def equal(self, before, now):
        """TRL's "every weight has changed" is asked of what is trained."""
        same, caller = torch.equal(before, now), sys._getframe(1)
        asks = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
        if same and "assert not torch.equal(" in asks and _may_stand_still(now):
            _latest["asked of the adapter"] = True
            return False
        return same

    def tensor(self, data, *args, **kwargs):
        return torch.tensor(_small(data), *args, **kwargs)


def _small(data):
    if isinstance(data, list):
        return [_small(item) for item in data]
    return small_id(data) if type(data) is int and data > 0 else data


def pytest_collection_modifyitems(items):
    for module in {item.module for item in items}:
        module.torch = _Torch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "setup":
        _latest.clear()
    outcome, message = report.outcome, ""
    if call.excinfo is not None:
        error = call.excinfo.value
        message = f"{type(error).__name__}: {error}".strip()
        if "couldn't find them in the cached files" in message:
            outcome, message = "skipped", "Skipped: no stand-in for the model"
    if call.when == "call" and outcome == "passed" and "asked of the adapter" in _latest:
        outcome, message = ASKED_OF_THE_ADAPTER, "the frozen base has not changed, all that is trained has"
        if still := _still():
            outcome, message = "failed", f"{len(still)} trained weights have not changed, e.g. {still[0]}"
    if call.when == "call" or (call.when == "setup" and outcome != "passed"):
        row = {"test": item.nodeid, "outcome": outcome, "message": message[:600], "seconds": round(call.duration, 1)}
        with _RESULT.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return report
