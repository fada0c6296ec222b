"""The commands of the CLI that acceptance.py runs, and what follows `qerl-trl` in each."""

from pathlib import Path

#: commands of the CLI that are run; those that read the folder of a finished run
COMMANDS = ("doctor", "plan", "train", "merge", "merge-adapter", "quantize", "eval")
AFTER_TRAIN = ("merge", "merge-adapter")


def name_of(command: str) -> str:
    """Which of COMMANDS a line of a result is."""
    verb = command.split()[1]
    return "merge-adapter" if verb == "merge" and "--as adapter" in command else verb


def words_of(name: str, work: Path, size: str, config: str, extra: list[str]) -> list[str]:
    """What follows `qerl-trl`."""
    finished, device = str(work / "train"), "cuda" if size != "tiny" else "cpu"
    local = ["--model_name_or_path", str(work / size), "--dataset_name", str(work / "problems")]
    short = ["--data", str(work / "problems"), "--limit", "8", "--max-new-tokens", "32"]
    return {
        "doctor": ["doctor"],
        "plan": ["plan", str(work / size), "--card", "RTX 4090"],
        "train": ["train", "--config", Path(config).stem, *local, "--max_steps", "1", "--output_dir", finished, *extra],
        "merge": ["merge", finished, str(work / "merged"), "--dtype", "float32"],
        "merge-adapter": ["merge", finished, str(work / "adapter"), "--as", "adapter"],
        "quantize": ["quantize", str(work / size), str(work / "quantized"), "--device", device],
        "eval": ["eval", str(work / size), *short],
    }[name]  # fmt: skip
