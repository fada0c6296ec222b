"""TRL's own tests of GRPO and RLOO with our trainers, compared with the same tests of the installed TRL.

    git clone --branch v1.16.0 https://github.com/huggingface/trl
    python -m tests.peers.run trl                # writes docs/peers.json; 1 if a difference is not in the list below
    python -m tests.peers.run trl -k "reward" --arms stock full --no-write

Models and data are local (stand_ins.py), runs are one epoch of three prompts, TRL's files are run in the clone. Arms:

    stock   TRL's trainers
    full    ours, base_format="full" (with an adapter: "bf16"), no noise: the same outcomes as stock
    nvfp4   ours, base_format="nvfp4", modules_to_not_convert=["experts"], no noise
"""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULT = ROOT / "docs" / "peers.json"
ARMS = ("stock", "full", "nvfp4")
FILES = ("tests/test_grpo_trainer.py", "tests/test_rloo_trainer.py")
#: instead of "passed" if TRL's test wants every weight changed: ours changes the trained ones (peers_plugin.py)
ASKED_OF_THE_ADAPTER = "passed, asked of the adapter"

#: accepted differences from stock: (message of the test, reason), all of the arm nvfp4
DIFFERENCES: tuple[tuple[str, str], ...] = (
    (
        r"the frozen base has not changed, all that is trained has",
        "the test asks whether every weight has changed: the base is frozen, and all of the adapter has",
    ),
    (
        r"'PeftModelForCausalLM' == 'RemoteForCausalLM'",
        "the test asks for the model's class: it is inside the adapter's",
    ),
    (
        r"base_format='nvfp4', but the \w+ passed has no NVFP4 layer",
        "the test passes a dense model: refused, with three ways to get a quantized one",
    ),
    (
        r"You passed `sync_ref_model=True` while using a PEFT model",
        "a reference model that follows the policy: TRL refuses it with an adapter",
    ),
    (
        r"cast_lm_head_to_fp32=True with an adapter",
        "a head in float32 that is tied to the embeddings: refused with an adapter, where TRL ends with an "
        "AttributeError",
    ),
)
#: the other way round
BETTER = "passes here and fails in stock, which without Liger kernels takes what it refuses with them"


def explain(arm: str, message: str) -> str | None:
    """The reason of a difference, if the list has it."""
    if not message:
        return BETTER
    return next((words for pattern, words in DIFFERENCES if arm == "nvfp4" and re.search(pattern, message)), None)


def compare(rows: dict[str, dict[str, dict]]) -> dict[str, dict]:
    """{test: {arm: {"outcome", "message"}}} -> {test: {arm: outcome, "why": {arm: reason, or None if unknown}}}"""
    found = {}
    for test, by_arm in rows.items():
        outcomes = {arm: row["outcome"] for arm, row in by_arm.items()}
        differ = [arm for arm, outcome in outcomes.items() if outcome != outcomes["stock"]]
        why = {arm: explain(arm, by_arm[arm]["message"]) for arm in differ}
        messages = {arm: by_arm[arm]["message"] for arm, words in why.items() if words is None}
        found[test] = {**outcomes, **({"why": why} if why else {}), **({"messages": messages} if messages else {})}
    return found


def unexplained(tests: dict[str, dict]) -> list[str]:
    return [
        f"{test} [{arm}]: {row['stock']} in stock, {row[arm]} here: {row['messages'][arm][:200]}"
        for test, row in tests.items()
        for arm, words in row.get("why", {}).items()
        if words is None
    ]


def run_arm(arm: str, checkout: Path, home: Path, folder: Path, options: list[str]) -> dict[str, dict]:
    """{test: {"outcome", "message"}} of one arm."""
    result = folder / f"{arm}.jsonl"
    paths = [HERE, ROOT / "src", ROOT / "kernels" / "torch-ext"]
    environment = os.environ | {
        "QERL_PEERS_ARM": arm,
        "QERL_PEERS_RESULT": str(result),
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    # -P: the trl of the checkout must not come before the installed one
    command = [sys.executable, "-P", *"-m pytest -q -p peers_plugin -p no:cacheprovider -o addopts=".split()]
    command += ["--rootdir", ".", "--timeout", "600", "--tb", "no", *FILES, *options]
    subprocess.run(command, cwd=checkout, env=environment, check=False)
    rows = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
    if not rows:
        raise RuntimeError(f"No test ran in {checkout} ({arm}); pytest says why, above.")
    return {row["test"]: {"outcome": row["outcome"], "message": row["message"]} for row in rows}


def record(results: dict[str, dict[str, dict]], checkout: Path, of: str) -> dict:
    """Content of docs/peers.json. `results`: {arm: {test: row}}; `of`: the commit that ran."""
    every = [test for test in results["stock"] if all(test in rows for rows in results.values())]
    tests = compare({test: {arm: rows[test] for arm, rows in results.items()} for test in every})
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "peft")}
    versions["torch"] = importlib.metadata.version("torch").partition("+")[0]
    return {
        "command": "python -m tests.peers.run CHECKOUT_OF_TRL",
        "commit": of,
        "versions": versions | {"tests of trl": (checkout / "VERSION").read_text().strip()},
        "counts": {arm: dict(sorted(Counter(row[arm] for row in tests.values()).items())) for arm in results},
        "tests": tests,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone of TRL at the installed version")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("-k", dest="keyword", default="not Slow")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    from tests.commit import commit
    from tests.peers import stand_ins

    of = commit()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stand_ins.write(folder / "home")
        checkout = arguments.checkout.resolve()
        options = ["-k", arguments.keyword]
        results = {arm: run_arm(arm, checkout, folder / "home", folder, options) for arm in arguments.arms}
    found = record(results, checkout, of)
    print(json.dumps(found["counts"], indent=2))
    left = unexplained(found["tests"])
    print("\n".join(left) or "Every difference is on the list.")
    if not arguments.no_write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
