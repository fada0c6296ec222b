"""GPUs by the names they are sold under, for a plan of a card that is not in this machine."""

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


def gpu_of_card(name: str) -> Gpu:
    """The memory of a card. A GB is a billion bytes, which is also about what the driver leaves of a binary one.

    Raises:
        `ValueError`: it is not known.
    """
    plain = _plain(name)
    size = next((size for card, size in CARDS.items() if _plain(card) == plain), None)
    if size is None:
        raise ValueError(f"--card {name!r} is none of {', '.join(CARDS)}. Say its memory instead: --gpu-gib.")
    return Gpu(size * 10**9)


def names_of(gigabytes: int) -> str:
    """The cards of that size."""
    return ", ".join(card for card, size in CARDS.items() if size == gigabytes)


def smallest_first() -> list[int]:
    return sorted(set(CARDS.values()))


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum()).removeprefix("nvidia").removeprefix("geforce")
