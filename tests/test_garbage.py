"""Python's search for garbage, at the start and in a run (garbage.py)."""

import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from qerl_trl import garbage


@pytest.fixture(autouse=True)
def as_before():
    enabled, threshold = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*threshold)
    if not enabled:
        gc.disable()


def test_what_a_user_imports_is_never_searched_as_a_whole():
    """Both statements that a script begins with; afterwards the collector is as it was, and knows none of what was imported."""
    code = """
import gc, sys
whole = []
gc.callbacks.append(lambda phase, info: whole.append(len(sys.modules)) if info["generation"] == 2 else None)
before = gc.get_threshold()
from qerl_trl import QeRLConfig
from qerl_trl import QeRLGRPOTrainer
print(whole, gc.isenabled(), gc.get_threshold() == before, len(gc.get_objects()) < 10_000 < gc.get_freeze_count(), "vllm" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1].rpartition(" ")[0] == "[] True True True"


def cycle() -> type:
    class Cycle:  # a class refers to itself
        pass

    return Cycle


@pytest.mark.parametrize("searched_last", [False, True], ids=["not searched", "searched a moment ago"])
def test_an_import_sets_nothing_aside_where_there_may_be_tensors(searched_last):
    assert "torch" in sys.modules
    gc.freeze()  # as after an import of ours
    made = [cycle() for _ in range(10 * garbage._NEXT_TO_NONE)]  # a script that has done something
    if searched_last:
        gc.collect()  # which counts from zero again, as gc.freeze() does
    with garbage.importing():
        assert not gc.isenabled()
    assert gc.isenabled() and {id(found) for found in gc.get_objects()} >= {id(one) for one in made}


@pytest.mark.parametrize("around", [garbage.importing, garbage.rarely])
def test_an_error_leaves_the_collector_as_it_was(around):
    with pytest.raises(ImportError), around():
        raise ImportError
    assert gc.isenabled() and gc.get_threshold() == (700, 10, 10)


def test_rarely_looks_at_young_objects_only():
    with garbage.rarely():
        with garbage.rarely():
            pass
        assert gc.get_threshold() == garbage._RARELY
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("chosen", [(0, 10, 10), (50_000, 10, 10)], ids=["never", "rarer"])
def test_who_has_chosen_otherwise_is_left_alone(chosen):
    gc.set_threshold(*chosen)
    with garbage.rarely():
        assert gc.get_threshold() == chosen
    gc.set_threshold(700, 10, 10)
    with garbage.rarely():
        gc.set_threshold(*chosen)
    assert gc.get_threshold() == chosen


def test_who_has_switched_it_off_is_left_alone():
    gc.disable()
    for around in (garbage.importing, garbage.rarely):
        with around():
            assert gc.get_threshold() == (700, 10, 10)
        assert not gc.isenabled()


def test_an_engine_that_fails_leaves_nothing_set_aside():
    frozen = gc.get_freeze_count()
    with pytest.raises(RuntimeError), garbage.set_aside():
        assert gc.get_freeze_count() > frozen
        raise RuntimeError
    assert gc.get_freeze_count() == 0


class Cycle:
    def __init__(self):
        self.itself = self


def searched() -> int:
    """How many of them the collector looks at."""
    return sum(type(found) is Cycle for found in gc.get_objects())


@pytest.fixture
def trainer():
    handler = CallbackHandler([], None, None, None, None)
    return SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cuda")), handler=handler,
        add_callback=handler.add_callback, remove_callback=handler.remove_callback,
        step=lambda: handler.on_step_end(None, TrainerState(), TrainerControl()),
    )  # fmt: skip


def test_in_a_run_nothing_is_searched_that_was_there_after_its_first_step(trainer):
    old = Cycle()
    with garbage.stepping(trainer):
        assert searched() == 1
        trainer.step()
        assert searched() == 0
        young = Cycle()
        trainer.step()
        assert searched() == 1
        del young
        gc.collect()
        assert searched() == 0
    assert searched() == 1 and gc.get_freeze_count() == 0 and not trainer.handler.callbacks
    del old
    gc.collect()
    assert searched() == 0


def test_a_run_that_fails_sets_nothing_aside(trainer):
    with pytest.raises(RuntimeError, match="in a step"), garbage.stepping(trainer):
        trainer.step()
        raise RuntimeError("in a step")
    assert gc.get_freeze_count() == 0 and not trainer.handler.callbacks


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_cpu_or_without_a_collector_a_run_changes_nothing(trainer, device):
    trainer.accelerator.device = torch.device(device)
    if device == "cuda":
        gc.disable()
    with garbage.stepping(trainer):
        assert not trainer.handler.callbacks
