"""Python's search for garbage during the start, in which next to nothing is garbage.

Everything that a run imports, some 700 000 objects, lives as long as the process. Python's collector knows it only by looking at all of it,
again and again while there is more every time, and vLLM asks for whole searches while it builds an engine: together several seconds of a
start. So there are few searches meanwhile, and what lives is set aside early, as vLLM itself does once its engine stands.

The standard library only: `qerl_trl/__init__.py` imports this.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: objects more than before, at which young ones are looked at; how often that has to happen before older ones are; all of them: never
_RARELY = 20_000, 20, 1_000_000
#: so many objects come of a few import statements
_NEXT_TO_NONE = 500


@contextmanager
def importing() -> Iterator[None]:
    """Around an import that may bring torch and all else: no search, and afterwards it is set aside where there can be no tensor yet, so
    that no memory stays taken which a later search would free. May be nested."""
    if not gc.isenabled():
        yield
        return
    young = "torch" not in sys.modules or _just_set_aside()
    gc.disable()
    try:
        yield
    finally:
        if young and "torch" in sys.modules:
            gc.freeze()
        gc.enable()


def _just_set_aside() -> bool:
    objects, *searches = gc.get_count()  # since gc.freeze(), which begins to count again
    return gc.get_freeze_count() > 0 and objects < _NEXT_TO_NONE and not any(searches)


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
