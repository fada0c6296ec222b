"""Put runs of rollout_speed.py and rollout_check.py into results/rollout_h200.json, with the targets that were missed.

    python rollout_results.py [SPEED.jsonl ...] [--checks CHECK.jsonl] --commit REV --command "..." [--engine-tests SUITE.log]

A speed run replaces throughput, profiles and sync times; one that holds `ours-slots:7b` replaces the comparison with vLLM's LoRA
slots. Checks replace the agreement of the 7B model and the modes (eager, CUDA graphs, torch.compile). Everything else stays as it is
and keeps the commit of the kernels that it was measured with.
"""

import argparse
import json
import statistics
from pathlib import Path

RESULTS = Path(__file__).parent / "results/rollout_h200.json"
SIZES = ("7b", "32b")
#: sequences -> (must, target), ours over stock vLLM's bf16 + LoRA
TARGETS = {8: (1.2, 1.5), 32: (1.2, 1.5), 64: (1.2, 1.5), 128: (1.0, 1.1), 256: (1.0, 1.1)}
TARGET_32B_AT_8 = 2.0
MUST_OVER_MERGED_7B_AT_8 = 1.4
WHAT = (
    "256-token prompts, 256 new tokens, temperature 1, processed log-probabilities, full decode CUDA graphs, no torch.compile, rank-32 "
    "adapter on all seven projections; ours: NVFP4 base shared with a trainer's model, adapter inside the quantized layer; stock-lora: bf16 with vLLM's LoRA slots; stock-merged: bf16 without adapter (what "
    "TRL runs after merging); median of up to three rollouts, the engines of one run side by side on the GPU, measured one after the other"
)


def read_cases(paths: list[Path]) -> dict[str, dict]:
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return {case["case"]: case for case in map(json.loads, lines)}


def speeds(cases: dict[str, dict]) -> dict[str, dict[str, float]]:
    return {
        name: {count: statistics.median(values) for count, values in case["tokens_per_s"].items()}
        for name, case in cases.items()
    }


def throughput(cases: dict[str, dict]) -> dict:
    section = {"what": WHAT, **speeds(cases)}
    section["ours_over_stock_lora"] = {
        size: {
            count: round(speed / section[f"stock-lora:{size}"][count], 3)
            for count, speed in section[f"ours:{size}"].items()
        }
        for size in SIZES
    }
    section["ours_over_stock_merged_7b_8"] = round(section["ours:7b"]["8"] / section["stock-merged:7b"]["8"], 3)
    section["prefill_s"] = {name: case["prefill_s"] for name, case in cases.items() if case["prefill_s"]}
    return section


def missed(section: dict) -> list[dict]:
    """Every must and target that was not reached."""
    rows = []
    for size in SIZES:
        for count, (must, target) in TARGETS.items():
            ratio = section["ours_over_stock_lora"][size][str(count)]
            target = TARGET_32B_AT_8 if (size, count) == ("32b", 8) else target
            if ratio < target:
                wanted = {"must": must} if ratio < must else {"target": target}
                rows.append({"model": size, "sequences": count, "over": "stock-lora", "ratio": ratio, **wanted})
    ratio = section["ours_over_stock_merged_7b_8"]
    if ratio < MUST_OVER_MERGED_7B_AT_8:
        wanted = {"must": MUST_OVER_MERGED_7B_AT_8}
        rows.append({"model": "7b", "sequences": 8, "over": "stock-merged", "ratio": ratio, **wanted})
    return rows


def full_run(cases: dict[str, dict]) -> dict:
    section = throughput(cases)
    profiles = {
        "what": "kernels of one decode step under torch.profiler, microseconds and launches a step; a kernel that is launched early and "
        "waits for its predecessor counts the waiting, so the sum of ours exceeds the wall time",
        **{name: case["profile"] for name, case in cases.items() if "profile" in case},
    }
    sync: dict = {
        "what": "wall ms of one sync with the device idle before and after: rank-32 adapter (float32 in the trainer) into the engine's "
        "bf16 buffers and prefix cache reset; a new draw for every noisy norm; both"
    }
    for size in SIZES:
        times = cases[f"ours:{size}"]["sync_ms"]
        medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
        sync[size] = {"sync_ms": times, "sync_ms_median": medians}
    return {"rollout_tokens_per_s": section, "missed": missed(section), "profiles": profiles, "sync": sync}


def put_checks(record: dict, cases: dict[str, dict], measured: dict) -> None:
    ours = cases["agree-7b"]
    record["agreement"] |= {
        "ours": ours["mean_abs_logp_difference"],
        "stock_vllm_bf16_against_transformers_bf16": cases["agree-7b-stock"]["mean_abs_logp_difference"],
        "ours_with_random_rank32_adapter": ours["with_adapter"],
        "layers_with_bit_identical_dequantized_weights": f"{ours['dequantized_identical']} of {ours['layers']}",
        **measured,
    }
    names = {"eager": "eager", "graphs": "full CUDA graphs", "compiled": "torch.compile and CUDA graphs"}
    record["modes"] |= {title: cases[case] for case, title in names.items()} | measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("speed", type=Path, nargs="*")
    parser.add_argument("--checks", type=Path, help="output of rollout_check.py")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--command", required=True)
    parser.add_argument("--engine-tests", type=Path, help="log of `pytest tests/engine` on the same machine")
    args = parser.parse_args()
    cases = read_cases(args.speed)
    record = json.loads(RESULTS.read_text())
    measured = {"kernels": args.commit, "command": args.command}
    if "ours-slots:7b" in cases:
        what = "tokens/s: our adapter inside the quantized layer, the same base with the adapter in vLLM's LoRA slots, stock bf16 with slots"
        record["fused_against_slots"] = {"what": what, **measured, **speeds(cases)}
    elif cases:
        for name in ("agreement", "modes", "memory", "serve"):
            record[name].setdefault("kernels", record["kernels_commit"])
        record |= {"kernels_commit": args.commit, "command": args.command, **full_run(cases)}
    if args.checks:
        put_checks(record, read_cases([args.checks]), measured)
    if args.engine_tests:
        lines = args.engine_tests.read_text().strip().splitlines()
        outcomes = [line for line in lines if line.startswith(("ERROR tests", "FAILED tests", "SKIPPED"))]
        record["engine_tests"] = [lines[-1].strip("= "), *outcomes]
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
