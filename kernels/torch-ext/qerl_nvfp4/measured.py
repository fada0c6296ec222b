"""What was measured on this machine for a user's own model (refine.py, `qerl-trl tune`), kept between processes.

    $QERL_NVFP4_CACHE, else $XDG_CACHE_HOME/qerl_nvfp4, else ~/.cache/qerl_nvfp4
        NVIDIA_H200-132-6f0c1d5e90ab.json       device, multiprocessors, digest of these kernels' sources and Triton's version
        {"key": {...}, "sha256": of the entries, "entries": [
            {"N", "K", "rank", "tokens", "config", "us", "shipped_us"}, ...]}

An entry is for the `STEP` numbers of tokens up to its own, and for the ranks up to its own that are padded to it (`padded`).
Other kernels, another Triton or another GPU have a file of their own.  A file that is damaged, or was made for something else than its name
says, is refused by name, once, and what is shipped answers.  QERL_NVFP4_TUNED=0 leaves all of it unread.
"""

import functools
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .turns import one_process_at_a_time

STEP = 8  # tokens: an engine captures its CUDA graphs at multiples of it
RANKS = 16  # a rank counts as the next multiple of it, to which engines pad an adapter
LONGEST_S = 30.0  # that a process waits for another one that writes
_WHOLE_NUMBERS = ("N", "K", "rank", "tokens")


class Found(NamedTuple):
    """What the cache holds for a device: (N, K, padded rank, tokens) -> configuration, the file, and what is wrong ("": nothing)."""

    entries: dict[tuple[int, int, int, int], dict]
    path: Path
    problem: str


def padded(rank: int) -> int:
    """The rank under which an adapter's measurements are kept; 0 for no adapter."""
    return -(-rank // RANKS) * RANKS


def covering(M: int) -> int:
    """The number of tokens whose measurement answers for M."""
    return -(-M // STEP) * STEP


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


def key_of(device: str, sms: int) -> dict[str, str | int]:
    """What measurements depend on, besides matrix, rank and number of tokens."""
    import triton

    return {"device": device, "multiprocessors": sms, "kernels": source_digest(), "triton": triton.__version__}


def _prefix(key: dict) -> str:
    device = "".join(c if c.isalnum() or c in "._" else "_" for c in str(key["device"]))
    return f"{device}-{key['multiprocessors']}-"


def path_of(key: dict) -> Path:
    digest = hashlib.sha256(json.dumps([key["kernels"], key["triton"]]).encode()).hexdigest()[:12]
    return folder() / f"{_prefix(key)}{digest}.json"


def _sum(entries: list[dict]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def read(path: Path, key: dict, runs: Callable[[dict, int, int, int], bool]) -> list[dict]:
    """The entries of a file; `runs(config, N, K, tokens)`: whether a configuration can be launched at all.

    Raises:
        `ValueError`: what is wrong with the file.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not text
        raise ValueError(f"it cannot be read ({type(error).__name__}: {str(error)[:100]})") from error
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("it holds no entries")
    if content.get("key") != key:
        raise ValueError(f"it was measured for {content.get('key')}, and this is {key}")
    entries = content["entries"]
    if content.get("sha256") != _sum(entries):
        raise ValueError("its content is not what was written")
    for entry in entries:
        whole = isinstance(entry, dict) and all(type(entry.get(name)) is int for name in _WHOLE_NUMBERS)
        config = entry.get("config") if whole else None
        if not isinstance(config, dict) or not runs(config, entry["N"], entry["K"], entry["tokens"]):
            raise ValueError(f"it holds what cannot be launched: {str(entry)[:200]}")
    return entries


def load(device: str, sms: int, runs: Callable[[dict, int, int, int], bool]) -> Found:
    """The user's measurements for a device; what is wrong with them is said in a warning and returned."""
    key = key_of(device, sms)
    path = path_of(key)
    if not allowed():
        return Found({}, path, "")
    problem = ""
    if path.is_file():
        try:
            entries = read(path, key, runs)
            return Found({_place(e): e["config"] for e in entries}, path, "")
        except ValueError as error:
            problem = f"{path} is ignored: {error}. `qerl-trl tune` replaces it; QERL_NVFP4_TUNED=0 leaves it unread."
    elif others := sorted(other.name for other in _others(path, key)):
        problem = (
            f"{path.parent / others[-1]} was measured on such a GPU with other kernels or another Triton than these, and is not used: run "
            "`qerl-trl tune` again."
        )
    if problem:
        warnings.warn(f"qerl_nvfp4: {problem}", RuntimeWarning, stacklevel=2)
    return Found({}, path, problem)


def _others(path: Path, key: dict) -> list[Path]:
    return [p for p in path.parent.glob("*.json") if p.name.startswith(_prefix(key)) and p != path]


def _place(entry: dict) -> tuple[int, int, int, int]:
    return entry["N"], entry["K"], entry["rank"], entry["tokens"]


def _quietly(line: str) -> None:
    """To write takes milliseconds: there is nothing to tell who waits."""


def write(device: str, sms: int, entries: list[dict], runs: Callable[[dict, int, int, int], bool]) -> Path:
    """Add entries to the device's file, in the place of older ones for the same; other processes' stay.

    The file appears whole or not at all.

    Raises:
        `OSError`: the folder cannot be written.
    """
    key = key_of(device, sms)
    path = path_of(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    # whoever waits in vain writes all the same: a reader still finds a whole file, and the other process's entries may be missing in it
    with one_process_at_a_time(path.parent, path.stem, "", _quietly, LONGEST_S, everywhere=True):
        try:
            old = read(path, key, runs) if path.is_file() else []
        except ValueError:
            old = []  # refused by every reader: nothing is lost
        merged = {_place(e): e for e in [*old, *entries]}
        content = [merged[place] for place in sorted(merged)]
        lines = ",\n".join("  " + json.dumps(entry) for entry in content)
        head = json.dumps({"key": key, "sha256": _sum(content)})
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        temporary = Path(name)  # another machine's processes have the same numbers
        try:
            with open(descriptor, "w") as file:
                os.fchmod(descriptor, 0o644)  # mkstemp's is nobody else's
                file.write(f'{head[:-1]}, "entries": [\n{lines}\n]}}\n')
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path
