"""`qerl-trl tune`: measure the kernels for one model on this GPU."""

import contextlib
import sys
import time
from typing import Annotated, Any

import typer

from .options import AsJson, TrustRemoteCode, note, print_result


def tune(
    model: Annotated[str, typer.Argument(help="Folder or Hub id, bf16 or NVFP4; only its configuration is read.")],
    tokens: Annotated[
        str,
        typer.Option(
            help="Numbers of tokens to measure, multiples of 8: a range such as 8-512, or a list such as 64,128."
        ),
    ] = "8-512",
    rank: Annotated[int, typer.Option(min=0, help="Rank of the adapter; 0: none.")] = 32,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Stop after this long. What is not measured by then stays as it is shipped.")
    ] = 90.0,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Measure on this GPU which kernels are fastest for a model, and keep it for later runs. QERL_NVFP4_TUNED=0 ignores what is kept."""
    sizes = numbers_of_tokens(tokens)
    import torch

    from ..nvfp4.fused import matrices_of_checkpoint
    from ..nvfp4.linear import describe, kernels_for

    matrices = matrices_of_checkpoint(model, trust_remote_code=trust_remote_code)
    device = torch.device("cuda")
    if not torch.cuda.is_available() or kernels_for(device) is None:
        why = describe(device) if torch.cuda.is_available() else "there is no CUDA device"
        raise RuntimeError(f"tune measures the GPU that a run will use, and here {why}. Run it on that machine.")
    from qerl_nvfp4 import measured, refine, select
    from qerl_nvfp4.precompile import Weight

    if not measured.allowed():
        note("QERL_NVFP4_TUNED=0 is set: what is measured is kept, and not used before it is unset.")
    begin = time.monotonic()
    weights = [Weight(sum(m.rows), m.columns, m.rows, rank) for m in matrices]
    with contextlib.redirect_stdout(sys.stderr):  # candidates that fail are named
        found = refine.refine(weights, sizes, seconds, note)
    path = measured.path_of(measured.key_of(*select.device_properties(None)[:2]))
    took = time.monotonic() - begin
    names: dict[tuple[int, int], str] = {}
    for m in matrices:
        place = sum(m.rows), m.columns
        names[place] = f"{names[place]}, {m.name}" if place in names else m.name
    content: dict[str, Any] = {
        "cache": str(path),
        "device": torch.cuda.get_device_name(device),
        "rank": measured.padded(rank),
        "seconds": round(took, 1),
        "matrices": [{"name": names[one.N, one.K], **one._asdict()} for one in found],
    }
    lines = [f"{names[one.N, one.K]} {one.text()}" for one in found]
    print_result(content, as_json, [*lines, f"kept after {took:.0f} s: {path}"])
    if not any(one.entries for one in found):
        raise RuntimeError(f"Nothing was measured in {seconds:g} s: give more with --seconds, or fewer --tokens.")


def numbers_of_tokens(text: str) -> list[int]:
    """The numbers of tokens in "8-512" (every multiple of 8 in it) or "64,128".

    Raises:
        `ValueError`: it is neither.
    """
    try:
        first, dash, last = text.partition("-")
        found = list(range(int(first), int(last) + 1, 8)) if dash else [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or any(number <= 0 or number % 8 for number in found):
        raise ValueError(
            f"--tokens {text} is no list of multiples of 8. Give a range such as 8-512, or a list such as 64,128."
        )
    return found
