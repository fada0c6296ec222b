"""Python's search for garbage, in a program of which next to nothing is garbage.

Everything that a run imports, hundreds of thousands of objects, lives as long as the process. Python's collector knows it only by looking at
all of it, again and again while there is more every time, and vLLM asks for whole searches while it builds an engine: seconds of a start
(`collector_s` of `examples/benchmarks/start_time.py`). So there are few searches meanwhile, and what lives is set aside early, as vLLM
itself does once its engine stands. A script gains most that imports this package before others that bring torch.

Then a rollout makes two objects per token in vLLM and two more in TRL, which live until it is scored: enough for a search of everything that came
after the engine, compiled code above all, in each, while the GPU has nothing to do (`garbage` in `examples/benchmarks/step_speed.py`). So that
is set aside too, after the first step, and while completions are sampled only young objects are looked at.

The standard library only: `qerl_trl/__init__.py` imports this.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: objects more than before, at which young ones are looked at; how often that has to happen before older ones are; all of them: never
_RARELY = 20_000, 20, 1_000_000
#: no more objects than this come of a few import statements
_NEXT_TO_NONE = 500


@contextmanager
def importing() -> Iterator[None]:
    """Around an import that may bring torch and all else: no search, and afterwards it is set aside where there can be no tensor yet, so
    that no memory stays taken which a later search would free. May be nested."""
    if not gc.isenabled():
        yield
        return
    young = "torch" not in sys.modules or _all_is_set_aside()
    gc.disable()
    try:
        yield
    finally:
        if young and "torch" in sys.modules:
            gc.freeze()
        gc.enable()


def _all_is_set_aside() -> bool:
    # gc.get_count() does not tell: a search of everything begins to count again, as gc.freeze() does
    return gc.get_freeze_count() > 0 and len(gc.get_objects()) < _NEXT_TO_NONE


@contextmanager
def rarely() -> Iterator[None]:
    """Inside, garbage is looked for only among young objects. Also a decorator; may be nested. Who has switched the collector off, or
    made it rarer than this, is left alone, and so is who changes it meanwhile."""
    before = gc.get_threshold()
    if not gc.isenabled() or not 0 < before[0] < _RARELY[0]:
        yield
        return
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        if gc.get_threshold() == _RARELY:
            gc.set_threshold(*before)


@contextmanager
def set_aside() -> Iterator[None]:
    """Around the building of an engine: what lives is searched once now, and no more on the way. vLLM ends with setting it aside for good;
    where it fails nothing stays so, or memory in a cycle would stay taken."""
    gc.collect()
    gc.freeze()
    try:
        yield
    except BaseException:
        gc.unfreeze()
        raise


@contextmanager
def stepping(trainer: Any) -> Iterator[None]:
    """Around a run: what lives after its first step is searched then, and no more until the run ends. Afterwards nothing is set aside, so that a
    trainer that is given up can go, and its memory with it. On a CPU nobody waits, and nothing is changed."""
    if trainer.accelerator.device.type == "cpu" or not gc.isenabled():
        yield
        return
    from transformers import TrainerCallback

    class AfterTheFirstStep(TrainerCallback):
        done = False

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if not self.done:
                gc.collect()
                gc.freeze()
                self.done = True

    callback = AfterTheFirstStep()
    trainer.add_callback(callback)
    try:
        yield
    finally:
        trainer.remove_callback(callback)
        if callback.done:
            gc.unfreeze()
