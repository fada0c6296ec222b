"""Measured choices in one format: what is shipped, and over it what the user measured (refine.py, `qerl-trl tune`).

    configs/cost_model.json                     measured on an H200, for Hopper GPUs with as many multiprocessors
    $QERL_NVFP4_CACHE, else $XDG_CACHE_HOME/qerl_nvfp4, else ~/.cache/qerl_nvfp4
        NVIDIA_H200-132-6f0c1d5e90ab.json       device, multiprocessors, digest of these kernels' sources and Triton's version
        {"sha256": of the entries, "entries": [{"N", "K", "rank", "tokens", "config", ...}, ...]}

An entry is for the `STEP` numbers of tokens up to its own, and for the ranks up to its own that are padded to it (`padded`).
Other kernels, another Triton or another GPU have a file of their own.  A damaged file is refused by name, once.
QERL_NVFP4_TUNED=0 leaves the user's measurements unread.
"""

import functools
import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

from . import cost
from .turns import one_process_at_a_time

STEP = 8  # tokens: an engine captures its CUDA graphs at multiples of it
RANKS = 16  # a rank counts as the next multiple of it, to which engines pad an adapter
SHIPPED_RANK = 32  # of the shipped measurements; up to 16 tokens they answer for other ranks too
LONGEST_S = 30.0  # that a process waits for another one that writes
HERE = "measured on this GPU"


class Found(NamedTuple):
    """(N, K, padded rank, tokens, W4A8) -> (configuration, where it was measured), the user's file, and its problem ("": none)."""

    entries: dict[tuple[int, int, int, int, bool], tuple[dict, str]]
    path: Path
    problem: str

    def fastest(self, N: int, K: int, M: int, rank: int, fp8: bool) -> tuple[dict, str] | None:
        """For M tokens and an adapter of this rank (0: none)."""
        tokens = -(-M // STEP) * STEP
        found = self.entries.get((N, K, padded(rank), tokens, fp8))
        if found is None and rank and M <= 16 and not fp8:
            found = self.entries.get((N, K, SHIPPED_RANK, tokens, fp8))
        return found


def padded(rank: int) -> int:
    """The rank under which an adapter's measurements are kept; 0 for no adapter."""
    return -(-rank // RANKS) * RANKS


def allowed() -> bool:
    """Whether the cache may be asked."""
    return os.environ.get("QERL_NVFP4_TUNED", "1") != "0"


def folder() -> Path:
    own = os.environ.get("QERL_NVFP4_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl_nvfp4"


@functools.cache
def source_digest() -> str:
    """Of this package's sources: measurements of other kernels say nothing about these."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def path_of(device: str, sms: int) -> Path:
    import triton

    name = "".join(c if c.isalnum() or c in "._" else "_" for c in device)
    digest = hashlib.sha256(json.dumps([source_digest(), triton.__version__]).encode()).hexdigest()[:12]
    return folder() / f"{name}-{sms}-{digest}.json"


def _sum(entries: list[dict]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> list[dict]:
    """The entries of a user's file.

    Raises:
        `ValueError`: it is damaged.
    """
    try:
        content = json.loads(path.read_bytes())
        if content["sha256"] == _sum(content["entries"]):
            return content["entries"]
    except (OSError, ValueError, KeyError, TypeError) as error:  # ValueError: not JSON, or not text
        raise ValueError(f"it cannot be read ({type(error).__name__}: {str(error)[:100]})") from error
    raise ValueError("its content is not what was written")


@functools.cache
def load(device: str, sms: int, capability: tuple[int, int], own: bool) -> Found:
    """The measurements for a device, without the user's if not `own`; a problem with these is said in a warning and returned."""
    entries, problem, path, model = {}, "", path_of(device, sms), cost.shipped()
    if capability[0] == 9 and sms == model["multiprocessors"]:
        entries = {_place(e): (e["config"], f"measured on {model['device']}") for e in model["entries"]}
    others = sorted(p.name for p in path.parent.glob(f"{path.name.rsplit('-', 1)[0]}-*.json") if p != path)
    if not own or not allowed():
        pass
    elif path.is_file():
        try:
            entries |= {_place(e): (e["config"], HERE) for e in read(path)}
        except ValueError as error:
            problem = f"{path} is ignored: {error}. `qerl-trl tune` replaces it; QERL_NVFP4_TUNED=0 leaves it unread."
    elif others:
        problem = (
            f"{path.parent / others[-1]} was measured on such a GPU with other kernels or another Triton than these, and is not used: run "
            "`qerl-trl tune` again."
        )
    if problem:
        warnings.warn(f"qerl_nvfp4: {problem}", RuntimeWarning, stacklevel=2)
    return Found(entries, path, problem)


def _place(entry: dict) -> tuple[int, int, int, int, bool]:
    return entry["N"], entry["K"], entry["rank"], entry["tokens"], entry["config"].get("fp8", False)


def write(device: str, sms: int, entries: list[dict]) -> Path:
    """Add entries to the user's file for a device, in the place of older ones for the same; other processes' stay.

    The file appears whole or not at all.

    Raises:
        `OSError`: the folder cannot be written.
    """
    path = path_of(device, sms)
    path.parent.mkdir(parents=True, exist_ok=True)
    # whoever waits in vain writes all the same: a reader still finds a whole file, and the other process's entries may be missing in it
    with one_process_at_a_time(path.parent, path.stem, "", lambda line: None, LONGEST_S, everywhere=True):
        try:
            old = read(path) if path.is_file() else []
        except ValueError:
            old = []  # refused by every reader: nothing is lost
        merged = {_place(e): e for e in [*old, *entries]}
        content = [merged[place] for place in sorted(merged)]
        lines = ",\n".join("  " + json.dumps(entry) for entry in content)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        temporary = Path(name)  # another machine's processes have the same numbers
        try:
            with open(descriptor, "w") as file:
                os.fchmod(descriptor, 0o644)  # mkstemp's is nobody else's
                file.write(f'{{"sha256": "{_sum(content)}", "entries": [\n{lines}\n]}}\n')
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path
