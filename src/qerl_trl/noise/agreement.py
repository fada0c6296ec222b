"""Whether all processes of a run have the same noise, and the engines of all of them.

Each draws its own, from the same key (`generator`). It would be another one where a machine has other settings, another version of this
package, or a device that computes otherwise, and nobody would see it: each process's rollouts would belong to a policy of their own.
"""

import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .callback import AQNCallback


def check_agreement(accelerator: Accelerator, aqn: AQNCallback, engine: int | None = None) -> None:
    """Compare the noise of the latest rollout. Collective: two numbers per process.

    Args:
        engine: sum of the bits of the norms that this process's engine computed with, where it has one.

    Raises:
        RuntimeError: it is not the same; says what each process has.
    """
    if accelerator.num_processes == 1:
        return
    draw, values = aqn.last_draw, aqn.digest() if engine is None else str(engine)
    key = torch.tensor([[_number(f"{draw} {aqn.norms}"), _number(values) if values else 0]], dtype=torch.int64)
    keys, numbers = accelerator.gather(key.to(accelerator.device)).T.tolist()
    if len(set(keys)) == 1 and len(set(numbers) - {0}) <= 1:  # in server mode one process has an engine
        return
    each = gather_object([f"{draw} on {len(aqn.norms)} norms, values {values or 'elsewhere'}"])
    said = "; ".join(f"process {rank}: {text}" for rank, text in enumerate(each))
    raise RuntimeError(
        f"The noise of this rollout is not the same in all processes: {said}. Their completions belong to different policies. Give all of "
        "them the same settings (seed, aqn_*), model and package versions, and resume from the last checkpoint; aqn=False trains without noise."
    )


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
