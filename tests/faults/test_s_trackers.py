"""R7, the loggers of `report_to`: what transformers and TRL hand over to them, and what trackio and TensorBoard write of it, has no secret in it.

Both run on this machine only, where they are installed (`pip install trackio tensorboard`); the stand-in runs everywhere.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from transformers import TrainerCallback

from .catalog import fault
from .test_r7_hub import PARTS, PLACES, everything
from .test_s_publish import run


class StandInTracker(TrainerCallback):
    """Writes down what transformers' integrations read: arguments in each of their forms, the model's and adapter's configurations, logs."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def _write(self, *said: object) -> None:
        with open(self.file, "a") as file:
            file.writelines(f"{each!r}\n" for each in said)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._write(args.to_dict(), args.to_sanitized_dict(), args.to_json_string(), args, str(args))
        self._write(model.config.to_dict(), {name: config.to_dict() for name, config in model.peft_config.items()})

    def on_log(self, args, state, control, logs=None, **kwargs):
        self._write(logs, state.log_history, {"model": kwargs["model"].config.to_json_string()})


@fault("R7.token")
@pytest.mark.parametrize("tracker", ["stand-in", "trackio", "tensorboard"])
def test_a_token_reaches_no_tracker(tracker, tiny_model_dir, tiny_tokenizer, tmp_path, monkeypatch):
    if tracker != "stand-in" and importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    written = tmp_path / "tracked"
    written.mkdir()
    for name, value in PLACES.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(written))
    for name, module in list(sys.modules.items()):  # trackio reads TRACKIO_DIR when it is imported, which TRL does
        if name.partition(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", written)
    local = {"trackio_space_id": None, "trackio_static_space_id": False, "project": "secrets"}
    report = {} if tracker == "stand-in" else {"report_to": tracker}
    trainer = run(tiny_model_dir, tiny_tokenizer, tmp_path, log_completions=True, logging_steps=1, **local, **report)
    if tracker == "stand-in":
        trainer.add_callback(StandInTracker(written / "tracked.txt"))
    trainer.train()
    for callback in list(trainer.callback_handler.callbacks):
        if hasattr(callback, "tb_writer") and callback.tb_writer is not None:
            callback.tb_writer.close()
    found = dict(everything(written))
    assert any(b"learning_rate" in data for data in found.values()), "nothing was tracked"
    for place, value in PLACES.items():
        secret = PARTS.get(place, value).encode()
        assert not [name for name, data in found.items() if secret in data], place
    assert os.environ["HF_TOKEN"] == PLACES["HF_TOKEN"]  # whoever needs it has it
