"""The cards in `hub_cards/examples`, from the facts that a real run left beside them.

    python hub_cards/render_examples.py                       # README text from the committed JSON, after a change of the templates
    python hub_cards/render_examples.py --run OUTPUT_DIR      # JSON and text from a finished run of the embedded example

The run is `python examples/grpo_gsm8k.py --config examples/configs/embedded.yaml --output_dir OUTPUT_DIR`. It is exported in all forms,
as a user would: `qerl-trl merge` as adapter, bf16, re-quantized, and onto the unquantized base, and `qerl-trl quantize`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from qerl_trl.publish import card

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "hub_cards" / "examples"
MODEL = ROOT / "examples" / "assets" / "tiny-qwen2"
PROMPTS = ROOT / "examples" / "assets" / "test.jsonl"
DATASET = "generated-word-problems"


def forms(run: Path) -> dict[str, list[str]]:
    """Name of an example -> the command that makes it, without its destination."""
    merge, named = ["merge", str(run)], ["--dataset", DATASET]
    measured = ["--prompts", str(PROMPTS)]
    return {
        "tiny-qwen2-grpo-lora": [*merge, *named, "--as", "adapter"],
        "tiny-qwen2-grpo": [*merge, *named, *measured],
        "tiny-qwen2-grpo-nvfp4": [*merge, *named, "--as", "nvfp4", "--force"],
        "tiny-qwen2-grpo-original-base": [*merge, *named, *measured, "--onto-original"],
        "tiny-qwen2-nvfp4": ["quantize", str(MODEL)],
    }


def export(run: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name, (command, first, *options) in forms(run).items():
            folder = Path(scratch) / name
            arguments = [command, first, str(folder), *options]
            subprocess.run([sys.executable, "-m", "qerl_trl.cli.main", *arguments], check=True)
            shutil.copyfile(folder / card.FACTS_NAME, EXAMPLES / f"{name}.json")


def render() -> None:
    for facts in sorted(EXAMPLES.glob("*.json")):
        facts.with_suffix(".md").write_text(card.render(json.loads(facts.read_text())))
        print(facts.with_suffix(".md").relative_to(ROOT))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="finished run to export; default: keep the facts, render the text")
    arguments = parser.parse_args()
    if arguments.run is not None:
        export(arguments.run)
    render()
