"""TRL's own notebooks, turned into runs on a 4-bit base by the lines of a diff, executed on a CPU.

    git clone --branch v1.16.0 https://github.com/huggingface/trl
    python -m tests.peers.notebooks trl              # writes docs/notebooks.json; 1 if one does not run

The code is read from the clone. A notebook runs from its first cell to the one that saves the model, with `diff`
applied and without what needs a GPU, a login or a network (`SMALLER`, `skipped`); models and data are stand-ins.
"""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.commit import commit
from tests.peers import stand_ins

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs" / "notebooks.json"
FOLDER = "examples/notebooks"

#: line for line: what a user types
THREE_LINES = (
    ("from trl import GRPOConfig", "from qerl_trl import QeRLConfig"),
    ("= GRPOConfig(", "= QeRLConfig("),
    ("from trl import GRPOTrainer", "from qerl_trl import QeRLGRPOTrainer"),
    ("trainer = GRPOTrainer(", "trainer = QeRLGRPOTrainer("),
)


@dataclass(frozen=True)
class Notebook:
    """`models`: name -> one of `stand_ins.MODELS`. `after`: folder of the adapter. `diff`: beyond `THREE_LINES`."""

    models: dict[str, str]
    after: str
    diff: tuple[tuple[str, str], ...] = ()


NOTEBOOKS = {
    "grpo_trl_lora_qlora": Notebook(
        {"Qwen/Qwen2-7B-Instruct": "tiny-Qwen2ForCausalLM-2.5"},
        "t4-Qwen2-7B-Instruct-GRPO",
        (("    quantization_config=quantization_config,\n", ""),),
    ),
    "grpo_rnj_1_instruct": Notebook(
        {"EssentialAI/rnj-1-instruct": "tiny-Qwen2ForCausalLM-2.5"},
        "EssentialAI-rnj-1-instruct-trl-grpo",
        (
            ("import torch\n\nmodel_name", "import torch\nfrom qerl_trl import NVFP4Config\n\nmodel_name"),
            ("quantization_config=BitsAndBytesConfig(", "quantization_config=NVFP4Config("),
            (
                "\n        load_in_4bit=True,\n        bnb_4bit_use_double_quant=True,\n"
                '        bnb_4bit_quant_type="nf4",\n        bnb_4bit_compute_dtype=torch.float16\n    ',
                "",
            ),
        ),
    ),
    "grpo_agent": Notebook({"Qwen/Qwen3-1.7B": "tiny-Qwen3ForCausalLM"}, "grpo_biogrid_qwen_3g-1.7b"),
}
#: why the others are not here
LEFT_OUT = {
    "grpo_ministral3_vl": "pictures: its processor has no stand-in",
    "grpo_qwen3_vl": "pictures: its processor has no stand-in",
    "openenv_sudoku_grpo": "needs a server of OpenEnv",
    "openenv_wordle_grpo": "needs a server of OpenEnv",
}

SMALLER = (
    (r"= QeRLConfig\(", "= QeRLConfig(use_cpu=True, bf16=False,"),
    (r'"paged_adamw_8bit"', '"adamw_torch"'),
    (r"use_liger_kernel\s*=\s*True", "use_liger_kernel=False"),
    (r'report_to\s*=\s*"trackio"', 'report_to="none"'),
    (r"trackio_space_id\s*=\s*\w+", "trackio_space_id=None"),
    (r"(?<!\w)push_to_hub\s*=\s*True", "push_to_hub=False"),
    (r"(?<!#)max_steps\s*=\s*\d+", "max_steps=2"),
    (r"num_train_epochs\s*=\s*1", "max_steps=2"),
    (r"max_completion_length\s*=\s*\d+", "max_completion_length=8"),
    (r"use_vllm\s*=\s*True", "use_vllm=False"),
    (r"trainer\.push_to_hub\(.*\)", ""),
)
#: run before the first cell: data under the names that the notebooks say
DATA = """
import datasets, re
_ROWS = {
    "AI-MO/NuminaMath-TIR": {"problem": "What is %d + 1?", "solution": "$\\\\boxed{%d}$", "messages": "-"},
    "qgallouedec/biogrid": {"Alt IDs Interactor A": "entrez gene/locuslink:G%d", "Taxid Interactor A": "taxid:9606"},
    "qgallouedec/biogrid_qa": {"question": "Does the gene G%d exist?", "answer": "Yes"},
}
def _load(name, split=None):
    return datasets.Dataset.from_list([{k: re.sub("%d", str(i), v) for k, v in _ROWS[name].items()} for i in range(16)])
datasets.load_dataset = _load
"""
#: run after the last one
CHECK = """
from qerl_trl.nvfp4.linear import has_nvfp4
assert type(trainer).__name__ == "QeRLGRPOTrainer" and has_nvfp4(trainer.model)
assert trainer.state.global_step == 2
"""


def skipped(cell: str) -> bool:
    """Needs a login, or asks a GPU for its memory."""
    return cell.startswith("!pip") or "notebook_login" in cell or "torch.cuda." in cell


def program(notebook: Path, entry: Notebook) -> str:
    """The executed code."""
    cells = [each for each in json.loads(notebook.read_text())["cells"] if each["cell_type"] == "code"]
    sources = ["".join(each["source"]) for each in cells]
    last = next(i for i, source in enumerate(sources) if "trainer.save_model(" in source)
    code = "\n\n".join(source for source in sources[: last + 1] if not skipped(source))
    for old, new in (*THREE_LINES, *entry.diff):
        if code.count(old) != 1:
            raise RuntimeError(f"{notebook.name}: {old!r} is there {code.count(old)} times, not once. Other TRL?")
        code = code.replace(old, new)
    for pattern, new in SMALLER:
        code = re.sub(pattern, new, code)
    return f"{DATA}\n{code}\n{CHECK}"


def run(name: str, checkout: Path) -> dict[str, object]:
    """Execute one; {"outcome": "passed"} or what went wrong."""
    entry = NOTEBOOKS[name]
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        for model, stand_in in entry.models.items():
            owner, _, short = model.partition("/")
            stand_ins.write_model(stand_ins.snapshot(home, short, owner), stand_in)
        path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "kernels" / "torch-ext")))
        environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = path
        code = program(checkout / FOLDER / f"{name}.ipynb", entry)
        done = subprocess.run([sys.executable, "-c", code], cwd=home, env=environment, capture_output=True, text=True)
        saved = (home / entry.after / "adapter_model.safetensors").is_file()
    if done.returncode == 0 and saved:
        return {"outcome": "passed"}
    return {"outcome": "failed", "message": done.stderr[-1500:]}


def table(outcomes: dict[str, dict[str, object]]) -> dict[str, object]:
    """Content of docs/notebooks.json."""
    diffs = {name: [*map(list, (*THREE_LINES, *NOTEBOOKS[name].diff))] for name in outcomes}
    rows = {name: {"diff": diffs[name], **row} for name, row in outcomes.items()}
    return {"notebooks": rows, "left out": LEFT_OUT}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone of TRL at the installed version")
    checkout = parser.parse_args().checkout.resolve()
    of = commit()
    found = {name: run(name, checkout) for name in NOTEBOOKS}
    there = {path.stem for path in (checkout / FOLDER).glob("*grpo*.ipynb")}
    print(json.dumps(found, indent=1), "unknown:", sorted(there - NOTEBOOKS.keys() - LEFT_OUT.keys()))
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "peft")}
    versions["notebooks of trl"] = (checkout / "VERSION").read_text().strip()
    command = "python -m tests.peers.notebooks CHECKOUT_OF_TRL"
    result = {"command": command, "commit": of, "versions": versions, **table(found)}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return any(row["outcome"] != "passed" for row in found.values())


if __name__ == "__main__":
    sys.exit(main())
