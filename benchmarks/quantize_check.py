"""Is `qerl-trl quantize` as fast as its disk? Random weights, real shapes.

    python benchmarks/quantize_check.py --shape 7b --folder /tmp/check --output quantize_check.json    # about 2 minutes on an H200
    python benchmarks/quantize_check.py --shape tiny --device cpu --folder /tmp/check                  # dry run

Every row is a process of its own, which reads the whole source once before its clock starts: all of them find it in the page cache, as
far as that holds it.

    floor      the source read and files as large as the result's written and flushed to disk (fsync), in pieces of 16 MiB, by as many
               threads; one after the other, both at once, and both at once with each piece's way to the disk started when it is written
               (sync_file_range); the fastest of the three counts
    quantize   `quantize_folder` from call to return: CUDA's start, compilation of the kernel, reading, arithmetic, writing, fsync, SHA-256
               of every file for the manifest, the final rename. "first": Triton's cache is empty; "again": it is not

Imports are timed apart: they depend on the installation, and the floor needs none of them.
"""

import argparse
import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common

_PIECE = 1 << 24
_START_WRITING = 2  # SYNC_FILE_RANGE_WRITE


def read_once(folder: Path) -> None:
    """Every byte of the checkpoint, so that a run finds the same page cache as the others."""
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb", buffering=0) as stream:
            while stream.read(_PIECE):
                pass
    os.sync()


def floor(source: Path, result: Path, scratch: Path, workers: int) -> dict:
    """Read `source`, write files as large as `result`'s into `scratch`: nothing is computed, nothing depends on anything."""
    sizes = {file.name: file.stat().st_size for file in result.glob("*.safetensors")}
    pieces = [
        (file, start)
        for file in sorted(source.glob("*.safetensors"))
        for start in range(0, file.stat().st_size, _PIECE)
    ]
    noise = memoryview(os.urandom(_PIECE))
    buffers = threading.local()

    def read_piece(piece: tuple[Path, int]) -> None:
        if not hasattr(buffers, "own"):
            buffers.own = memoryview(bytearray(_PIECE))
        with open(piece[0], "rb", buffering=0) as stream:
            stream.seek(piece[1])
            stream.readinto(buffers.own)

    def write_file(name: str, early: bool) -> None:
        with open(scratch / name, "wb", buffering=0) as stream:
            for start in range(0, sizes[name], _PIECE):
                stream.write(noise[: sizes[name] - start])
                if early:
                    ctypes.CDLL(None).sync_file_range(
                        stream.fileno(), ctypes.c_int64(start), ctypes.c_int64(_PIECE), _START_WRITING
                    )
            os.fsync(stream.fileno())

    def timed(together: bool, early: bool = False) -> float:
        scratch.mkdir()
        started = time.perf_counter()
        with ThreadPoolExecutor(workers) as pool:
            if together:
                writing = [pool.submit(write_file, name, early) for name in sizes]
                list(pool.map(read_piece, pieces))
                for future in writing:
                    future.result()
            else:
                list(pool.map(read_piece, pieces))
                list(pool.map(lambda name: write_file(name, early), sizes))
        seconds = time.perf_counter() - started
        shutil.rmtree(scratch)
        return seconds

    apart, together, early = timed(together=False), timed(together=True), timed(together=True, early=True)
    return {
        "seconds": min(apart, together, early),
        "one_after_the_other_seconds": apart,
        "both_at_once_seconds": together,
        "both_at_once_written_back_early_seconds": early,
        "files_written": len(sizes),
        "written_bytes": sum(sizes.values()),
    }


class Resident(threading.Thread):
    """The process's resident memory, sampled: the largest growth since the start."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.peak = self.now()
        self.start()

    @staticmethod
    def now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            time.sleep(0.02)


def quantize(source: Path, result: Path, device: str) -> dict:
    started = time.perf_counter()
    import torch

    from qerl_trl.publish import quantize as offline

    imports = time.perf_counter() - started
    memory = Resident()
    written: list[float] = []
    started = time.perf_counter()
    done = offline.quantize_folder(
        source, result, device=device, progress=lambda *_: written.append(time.perf_counter())
    )
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "seconds_to_first_write": written[0] - started,
        "seconds_to_last_write": written[-1] - started,
        "import_seconds": imports,
        "weights": done.weights,
        "weights_per_second": done.weights / seconds,
        "nmse": done.nmse,
        "memory_growth_bytes": memory.peak - memory.before,
        "gpu_peak_bytes": torch.cuda.max_memory_allocated() if device != "cpu" else None,
    }


def in_new_process(arguments: argparse.Namespace, step: str, triton_cache: Path) -> dict:
    command = [sys.executable, __file__, "--shape", arguments.shape, "--device", arguments.device]
    command += ["--folder", str(arguments.folder), "--step", step]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(triton_cache)}
    started = time.perf_counter()
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    row = {"step": step, **json.loads(output.splitlines()[-1]), "process_seconds": time.perf_counter() - started}
    print(row, flush=True)
    return row


def run_step(arguments: argparse.Namespace, source: Path, result: Path) -> dict:
    if arguments.step == "write":
        from models import write_checkpoint

        return {"bytes": write_checkpoint(arguments.shape, source, arguments.device)}
    if arguments.step == "describe":
        return common.head(arguments.device, arguments.commit) | {"cores": os.cpu_count()}
    started = time.perf_counter()
    read_once(source)
    read = {"reading_before_seconds": time.perf_counter() - started}
    if arguments.step == "floor":
        return read | floor(source, result, arguments.folder / "floor", min(os.cpu_count() or 1, 8))
    return read | quantize(source, result, arguments.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", help="Of models.py: tiny, 3b, 7b.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, required=True, help="Where checkpoint and result are written.")
    parser.add_argument("--repeats", type=int, default=2, help="Further runs, after the first.")
    parser.add_argument("--commit", help="Of the code that runs, where there is no git.")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--step", choices=("write", "describe", "floor", "quantize"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    source, result = arguments.folder / "source", arguments.folder / "nvfp4"
    if arguments.step:
        print(json.dumps(run_step(arguments, source, result)))
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    triton_cache = arguments.folder / "triton"
    if not source.exists():
        in_new_process(arguments, "write", arguments.folder / "triton_writing")
    rows = []
    for repeat in range(1 + arguments.repeats):
        for folder in (result, triton_cache) if repeat == 0 else (result,):
            shutil.rmtree(folder, ignore_errors=True)
        row = in_new_process(arguments, "quantize", triton_cache)
        bound = in_new_process(arguments, "floor", triton_cache)
        rows.append({"run": "again" if repeat else "first", "quantize": row, "floor": bound})
        rows[-1]["ratio"] = row["seconds"] / bound["seconds"]
        print(f"{rows[-1]['run']}: {row['seconds']:.2f} s, floor {bound['seconds']:.2f} s", flush=True)
    described = in_new_process(arguments, "describe", triton_cache)
    common.save(described | {"command": common.command(), "rows": rows}, arguments.output)
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
