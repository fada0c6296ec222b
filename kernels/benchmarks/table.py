"""Render the markdown tables of a result of compare.py, or of batch_invariant.py.

python table.py results/h200.json [> table.md]
python table.py results/batch_invariant_h200.json --page ../HOW_IT_WORKS.md      writes its section of that page
"""

import json
import sys
from pathlib import Path

from pages import placed


def cell(value, pattern: str = "{:.1f}") -> str:
    return "" if value is None else pattern.format(value)


def layer_table(result: dict) -> list[str]:
    """Microseconds of the four matrices of one decoder layer, and ratios to cuBLAS bf16."""
    lines = [
        "| model | tokens | floor us | bf16 us | Marlin us | ours us | ours + LoRA us | bf16 / Marlin | **bf16 / ours** | LoRA adds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for s in result["sums"]:
        overhead = s.get("lora_overhead")
        lines.append(
            f"| {s['model']} | {s['M']} | {cell(s.get('floor_us'))} | {cell(s.get('bf16_us'))} | {cell(s.get('marlin_us'))} "
            f"| {cell(s.get('ours_us'))} | {cell(s.get('ours_lora_us'))} | {cell(s.get('marlin_ratio'), '{:.2f}x')} "
            f"| **{cell(s.get('ratio'), '{:.2f}x')}** | {cell(None if overhead is None else 100 * overhead, '{:+.0f} %')} |"
        )
    return lines


def stream_table(result: dict) -> list[str]:
    rows = [r for r in result.get("streams", []) if "copy_TBps" in r]
    if not rows:
        return []
    lines = [
        "",
        "| matrix | copy TB/s | dequantize | quantize rtn | four_over_six | neighbor_sweep |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        keys = (
            "copy_TBps",
            "dequantize_TBps",
            "quantize_rtn_TBps",
            "quantize_four_over_six_TBps",
            "quantize_neighbor_sweep_TBps",
        )
        lines.append(f"| {r['matrix']} | " + " | ".join(cell(r.get(k), "{:.2f}") for k in keys) + " |")
    return lines


def humming_table(result: dict) -> list[str]:
    """Microseconds of each matrix that was timed, and of cuBLAS bf16."""
    rows = {(r["shape"], r["M"]): r for r in result.get("humming", [])}
    if not rows:
        return []
    shapes = dict.fromkeys(shape for shape, _ in rows)
    heads = [f"{shape}: {whose}" for shape in shapes for whose in ("humming-kernels us", "ours us", "bf16 us")]
    lines = ["", f"| tokens | {' | '.join(heads)} |", "|---:|" + "---:|" * len(heads)]
    for M in dict.fromkeys(M for _, M in rows):
        cells = [
            cell(rows.get((shape, M), {}).get(key)) for shape in shapes for key in ("humming_us", "ours_us", "bf16_us")
        ]
        lines.append(f"| {M} | {' | '.join(cells)} |")
    about = (
        "(The last table: single launches by events with a cold cache; the GPU waits until all of a call is launched.)"
    )
    return [*lines, "", about]


BEGIN, END = "<!-- batch_invariant: written by benchmarks/table.py -->\n", "<!-- end of batch_invariant -->\n"


def invariant_table(result: dict) -> list[str]:
    """Microseconds of a decoder layer by what is selected and in the batch-invariant mode."""
    lines = [
        "| model | tokens | selected us | batch-invariant us | that, times selected | bf16 / batch-invariant |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for r in result["layers"]:
        lines.append(
            f"| {r['model']} | {r['M']} | {r['selected_us']:.1f} | {r['invariant_us']:.1f} | {r['cost']:.2f} | {r['ratio']:.2f} |"
        )
    failed = [f"{f['model']} at {f['M']} tokens" for f in result["failed"]]
    lines += ["", f"Not bit-equal, and not timed: {', '.join(failed)}."] if failed else []
    about = (
        f"A decoder layer without its attention, norms and SwiGLU included, CUDA graph replays over rotating weights; rank-{result['lora_rank']} "
        f"adapter inside ours, none in bf16. Each size was compared bit for bit before it was timed. {result['device']}, torch {result['torch']}, "
        f"triton {result['triton']}, commit {result['commit'][:7]}."
    )
    return [*lines, "", about]


def written(page: str, result: dict) -> str:
    """The page with the table of the batch-invariant mode in its place."""
    return placed(page, BEGIN, END, "\n".join(invariant_table(result)) + "\n")


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text())
    if "failed" in result:
        if sys.argv[2:3] == ["--page"]:
            page = Path(sys.argv[3])
            page.write_text(written(page.read_text(), result))
        else:
            print("\n".join(invariant_table(result)))
        return
    print(
        f"{result['device']}, torch {result['torch']}, triton {result['triton']}, commit {result['commit'][:10]}, "
        f"`{result['command']}`; sums over qkv + o + gate_up + down of one decoder layer, CUDA graph replays over rotating weights, "
        f"rank-{result['lora_rank']} adapter.\n"
    )
    print("\n".join(layer_table(result) + stream_table(result) + humming_table(result)))


if __name__ == "__main__":
    main()
