"""Which kernel, with which configuration, for a matrix (N, K) and M tokens on a device.

A table tuned on the device (configs/<device name>.json, written by `python -m qerl_nvfp4.tune`) answers for the shapes it knows;
a heuristic answers for the others.  A configuration is a small dict:

    {"kernel": "skinny", "BM", "WK", "WN", "R", "grid"}        hopper.skinny_kernel, up to 16 tokens; with an adapter,
        "lora": {..., "cost"}                                  what differs, and K steps that a piece of x A^T counts as
    {"kernel": "wgmma", "BM", "P", "S", "permute", "grid"}     hopper_wgmma.wgmma_kernel, tiles of 64 P rows
        "lora": {"tasks", ...}                                 with an adapter: whether x A^T is computed beside it or by cuBLAS before
    {"kernel": "portable", "BM", "BN", "BK", "SK", "NW", "NS", "MMA"}    portable.gemm_kernel
    {"kernel": "dense", "pieces"}                              dequantize into a scratch buffer, then cuBLAS
"""

import functools
import json
import math
from pathlib import Path

import torch

CONFIG_FOLDER = Path(__file__).parent / "configs"
BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024)  # M is rounded up to one of these; above the last: "dense"


def table_path(device_name: str) -> Path:
    return CONFIG_FOLDER / f"device_name={device_name.replace(' ', '_')}.json"


@functools.cache
def load_table(device_name: str, sms: int) -> dict[tuple[int, int, int], dict]:
    """(N, K, bucket) -> configuration; empty when such a device with as many multiprocessors (MPS and green contexts may hide some) was
    never tuned. Bucket 0 stands for every larger M."""
    path = table_path(device_name)
    table = json.loads(path.read_text()) if path.is_file() else {}
    if table.get("multiprocessors") != sms:
        return {}
    return {(e["N"], e["K"], e["bucket"]): e["config"] for e in table["entries"]}


@functools.cache
def device_properties(index: int) -> tuple[str, int, tuple[int, int]]:
    """Name, multiprocessors, compute capability."""
    p = torch.cuda.get_device_properties(index)
    return p.name, p.multi_processor_count, (p.major, p.minor)


def with_adapter(config: dict) -> dict:
    """The configuration for a product with an adapter."""
    return config | config.get("lora", {})


def bucket_of(M: int) -> int:
    return next((b for b in BUCKETS if b >= M), 0)


def skinny_fits(config: dict, N: int, K: int) -> bool:
    return N % (16 * config["R"] * config["WN"]) == 0 and K % (128 * config["WK"]) == 0


def wgmma_fits(N: int, K: int) -> bool:
    return N % 16 == 0 and K % 256 == 0


def skinny_heuristic(N: int, K: int, M: int, sms: int) -> dict | None:
    """Rows and K split such that every multiprocessor gets about equal work and, for small matrices, tiles need not be shared."""
    BM = 8 if M <= 8 else 16
    for WK, WN, R in ((4, 1, 2), (4, 1, 1), (2, 2, 1), (2, 1, 1), (1, 4, 1), (1, 1, 1)):
        config = {"kernel": "skinny", "BM": BM, "WK": WK, "WN": WN, "R": R}
        if skinny_fits(config, N, K):
            return config | {"grid": sms * (4 if WK * WN == 4 else 8)}
    return None


def wgmma_heuristic(N: int, K: int, M: int, sms: int) -> dict | None:
    """Tiles of 192 rows where there are plenty, else of 128; few tiles are split along K so that each program has one piece."""
    if not wgmma_fits(N, K):
        return None
    BM, S = (32, 5) if M <= 32 else (64, 4) if M <= 64 else (128, 2)
    P = 3 if M > 64 and math.ceil(N / 192) * math.ceil(M / BM) > sms else 2
    tiles = math.ceil(N / (64 * P)) * math.ceil(M / BM)
    grid = sms if tiles > sms else tiles * max(1, min(sms // tiles, K // 512))
    return {"kernel": "wgmma", "BM": BM, "P": P, "S": S, "permute": M <= 64, "grid": grid}


def portable_heuristic(N: int, K: int, M: int, sms: int, hopper: bool) -> dict:
    BM = 16 if M <= 16 else 32 if M <= 32 else 64
    BN = 64 if N * math.ceil(M / BM) <= 64 * sms else 128
    tiles = math.ceil(N / BN) * math.ceil(M / BM)
    steps = math.ceil(K / 128)
    SK = max(1, min(steps, round(2 * sms / tiles)))
    SK = math.ceil(steps / math.ceil(steps / SK))
    return {
        "kernel": "portable",
        "BM": BM,
        "BN": BN,
        "BK": 128,
        "SK": SK,
        "NW": 4,
        "NS": 4 if BM < 64 else 3,
        "MMA": 3 if hopper else 2,
    }


@functools.lru_cache(maxsize=4096)
def choose(N: int, K: int, M: int, device_index: int, bf16: bool) -> dict:
    """The configuration for y (M, N) = x (M, K) W^T."""
    name, sms, capability = device_properties(device_index)
    hopper = capability[0] == 9
    bucket = bucket_of(M)
    tuned = load_table(name, sms).get((N, K, bucket))
    if tuned is not None and bf16:
        return tuned
    if tuned is not None and tuned["kernel"] == "dense":
        # with an adapter it may be another kernel, which takes bfloat16 only
        return {k: v for k, v in tuned.items() if k != "lora"}
    if hopper and bf16 and M <= 512:
        found = skinny_heuristic(N, K, M, sms) if M <= 16 else wgmma_heuristic(N, K, M, sms)
        if found is not None:
            return found
    if M > 128:
        return {"kernel": "dense", "pieces": 1}
    return portable_heuristic(N, K, M, sms, hopper)
