"""A run leaves the process and the user's objects as it found them."""

import gc
import logging
import signal
import sys
import threading

from qerl_trl import QeRLGRPOTrainer, from_pretrained
from tests.faults.tiny_runs import PROMPTS, spread_reward
from tests.trainers import settings
from tests.update.models import LORA


def filters():
    names = [None, *logging.Logger.manager.loggerDict]
    return {name: found for name in names if (found := list(logging.getLogger(name).filters))}


def process():
    return {
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "sys.unraisablehook": sys.unraisablehook,
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "garbage collector": (gc.get_threshold(), gc.isenabled(), gc.get_freeze_count() > 0),
        "log filters": filters(),
    }


def own_methods(given):
    """Functions of the instance in place of its class's methods. TRL replaces `forward` itself."""
    return {n: each for n, each in vars(given).items() if callable(each) and hasattr(type(given), n) and n != "forward"}


def test_a_run_leaves_no_traces(tiny_model_dir, tiny_tokenizer, tmp_path):
    model = from_pretrained(tiny_model_dir("qwen2"))
    args = settings(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    given = {"model": model, "tokenizer": tiny_tokenizer, "arguments": args}
    before = process() | {name: own_methods(each) for name, each in given.items()}
    trainer = QeRLGRPOTrainer(
        model, spread_reward, args=args, train_dataset=PROMPTS, processing_class=tiny_tokenizer, peft_config=LORA
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.evaluate(PROMPTS.select(range(4)))
    after = process() | {name: own_methods(each) for name, each in given.items()}
    assert {name: after[name] for name in after if after[name] != before[name]} == {}
