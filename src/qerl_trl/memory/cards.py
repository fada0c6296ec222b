"""GPUs by the names they are sold under, for a plan of a card that is not in this machine."""

import re

from .plan import Gpu

#: name -> GB as sold; from Ampere on, which is what the kernels and bf16 need
CARDS = {
    "RTX 3060": 12,
    "RTX 4080": 16,
    "RTX 5080": 16,
    "RTX 3090": 24,
    "RTX 4090": 24,
    "A10": 24,
    "L4": 24,
    "RTX 5090": 32,
    "A100 40GB": 40,
    "A6000": 48,
    "L40S": 48,
    "A100": 80,
    "H100": 80,
    "RTX PRO 6000": 96,
    "H200": 141,
    "B200": 180,
}
#: the same of cards that no table names
OTHERS = {
    "RTX 4060": 8,
    "RTX 5060": 8,
    "RTX 4070": 12,
    "RTX 5070": 12,
    "RTX 4060 Ti": 8,
    "RTX 5070 Ti": 16,
    "A10G": 24,
    "A30": 24,
    "A40": 48,
    "L40": 48,
    "RTX 6000 Ada": 48,
    "H100 NVL": 94,
    "GH200": 96,
    "B300": 288,
}
_SIZE = r"\b(\d+) ?gi?b\b"
_NO_MATTER = r"\b(nvidia|geforce|tesla|generation|laptop|gpu|pcie|sxm\d?|hbm\d?e?)\b|\brtx(?=\W|\d)"
#: sold in data centres still, and without bf16 matrix units
TOO_OLD = ("P100", "V100", "T4", "RTX 2080 Ti")


def gpu_of_card(name: str) -> Gpu:
    """The memory of a card, by its name in a shop, in a cloud or in nvidia-smi ("NVIDIA H100 80GB HBM3", "a10g", "4090"). A GB is a billion bytes,
    which is also about what the driver leaves of a binary one.

    Raises:
        `ValueError`: it is not known, or too old.
    """
    known = {_plain(card): size for card, size in (CARDS | OTHERS).items()}
    plain, said = _plain(name), re.search(_SIZE, name.lower())
    if plain in known:
        return Gpu((int(said[1]) if said else known[plain]) * 10**9)
    if plain in map(_plain, TOO_OLD):
        raise ValueError(
            f"--card {name!r} is older than Ampere (compute capability 8.0), which bf16 and the kernels need."
        )
    raise ValueError(f"--card {name!r} is none of {', '.join(CARDS | OTHERS)}. Say its memory instead: --gpu-gib.")


def _plain(name: str) -> str:
    """Without the words that tell no card from another, and without its memory."""
    return "".join(re.findall(r"[a-z0-9]+", re.sub(rf"{_SIZE}|{_NO_MATTER}", " ", name.lower())))
