"""What was wanted of whole rollouts, for readme_tables.py."""

import json

import rollout_results
from rollout_tables import OTHERS, ROLLOUT

#: times the speed of another engine, by number of sequences
WANTED = {
    ("7b", "stock-merged"): {8: 1.6, 64: 1.25, 128: 1.05, 256: 1.0},
    ("32b", "stock-lora"): {8: 2.4, 64: 1.6, 128: 1.45},
}


def rollout_wanted() -> str:
    """Of each aim whether it was reached."""
    ratios = json.loads(ROLLOUT.read_text())["ratios"]
    said = []
    for (size, other), wanted in WANTED.items():
        found = ratios[f"ours:{size} over {other}:{size}"]
        cells = [
            f"{found[str(count)]:.3f} at {count} ({aim:g}: {'reached' if found[str(count)] >= aim else 'missed'})"
            for count, aim in wanted.items()
        ]
        said.append(f"Times {OTHERS[other]}, {rollout_results.label(size)}, wanted in brackets: {', '.join(cells)}.")
    return " ".join(said)
