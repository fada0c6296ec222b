"""Several processes of one run, forked from the test: they start at once, with everything imported."""

import contextlib
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.state import AcceleratorState, GradientState, PartialState


class Outcome(NamedTuple):
    """Of one process. answer: the result of its work, or the text of its exception. code: its exit code."""

    answer: Any
    code: int | None
    stderr: str


def on_ranks(ranks: int, work: Callable[[int], Any], timeout: float = 60) -> list[Outcome]:
    """`work(rank)` in each of `ranks` processes, with the environment of a launcher. Its exception is its answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parallel = multiprocessing.get_context("fork")
    answers = [parallel.Pipe(duplex=False) for _ in range(ranks)]
    printed = [tempfile.mkstemp()[1] for _ in range(ranks)]

    def process(rank: int) -> None:
        sys.stderr = Path(printed[rank]).open("w", buffering=1)  # noqa: SIM115  (open until the process ends)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()
        try:
            answers[rank][1].send(work(rank))
        except Exception as error:
            traceback.print_exc()
            answers[rank][1].send(f"{type(error).__name__}: {error}")

    processes = [parallel.Process(target=process, args=(rank,)) for rank in range(ranks)]
    for started in processes:
        started.start()
    for _, there in answers:
        there.close()  # else a process that is killed leaves us waiting
    outcomes = []
    for (here, _), started, name in zip(answers, processes, printed, strict=True):
        answer = "nothing was said"
        if here.poll(timeout):
            with contextlib.suppress(EOFError):  # it was killed
                answer = here.recv()
        started.join(10)
        started.kill()
        started.join()
        outcomes.append(Outcome(answer, started.exitcode, Path(name).read_text()))
        os.unlink(name)
    return outcomes
