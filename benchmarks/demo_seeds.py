"""`make demo`, and the same run with further seeds: what the README says of the embedded example.

    python benchmarks/demo_seeds.py run --seeds 43 44                       # after `make install`; about ten minutes on two cores
    python benchmarks/demo_seeds.py collect runs/embedded runs/embedded-43  # of runs that are there

The seed decides the adapter's initial values, the order of problems, sampling and noise; the pretrained model is the same. A folder that holds
a finished run is measured again and not trained again: remove it first.
"""

import argparse
import json
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).resolve().parent / "results" / "demo.json"
DEMO = ROOT / "runs" / "embedded"  # output_dir of examples/configs/embedded.yaml
CONFIG = "examples/configs/embedded.yaml"
#: of what a step logs
CURVES = ("step", "reward", "entropy", "aqn/", "seconds/", "rollout/")
LAUNCH = "accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no examples/grpo_gsm8k.py"


def run(seeds: list[int]) -> list[Path]:
    """Train; the folders."""
    subprocess.run(["make", "demo"], cwd=ROOT, check=True)
    folders = [DEMO]
    for seed in seeds:
        folders.append(ROOT / "runs" / f"embedded-{seed}")
        options = ["--config", CONFIG, "--seed", str(seed), "--output_dir", str(folders[-1].relative_to(ROOT))]
        subprocess.run([*shlex.split(LAUNCH), *options], cwd=ROOT, check=True)
    return folders


def record(folders: list[Path], commit: str, note: str) -> dict:
    """What is committed of finished runs.

    Raises:
        ValueError: two runs have one seed.
    """
    runs = [json.loads((folder / "results.json").read_text()) for folder in folders]
    for folder, found in zip(folders, runs, strict=True):
        settings = found["settings"]
        settings["model"] = settings["model"].removeprefix(f"{ROOT}/")
        found["log_history"] = [
            {name: value for name, value in entry.items() if name.startswith(CURVES)} for entry in found["log_history"]
        ]
        if folder.name == DEMO.name:
            found["command"] = "make demo"
    seeds = [found["seed"] for found in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{', '.join(map(str, folders))} have the seeds {seeds}: name each run once.")
    number = {2: "two", 3: "three", 4: "four", 5: "five"}.get(len(runs), str(len(runs)))
    what = f"The embedded default with {number} seeds" if len(runs) > 1 else "The embedded default"
    return {"what": what, "commit": commit, "note": note, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="action")
    commands.add_parser("run").add_argument(
        "--seeds", type=int, nargs="*", default=[43, 44], help="besides make demo's"
    )
    commands.add_parser("collect").add_argument("folders", type=Path, nargs="+")
    for each in commands.choices.values():
        each.add_argument("--note", default="", help="what else the machine did meanwhile")
        each.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    folders = run(args.seeds) if args.action == "run" else args.folders
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    args.output.write_text(json.dumps(record(folders, commit.stdout.strip(), args.note), indent=1) + "\n")


if __name__ == "__main__":
    main()
