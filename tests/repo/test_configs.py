"""Every shipped configuration on cards of every size: it starts, or the message has a remedy; headers are computed.

`python -m tests.repo.test_configs` rewrites the headers and shapes.json, from which `qerl-trl plan` plans at once.
"""

import dataclasses
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file

from qerl_trl.memory.formulas import shape_of
from qerl_trl.memory.plan import CARDS, GIB, Gpu, MemoryPlan, plan_run
from qerl_trl.memory.workload import workload_of_file
from tests.shapes import FOURTEEN_B, HALF_B, NEWER, SEVEN_B, THIRTY_TWO_B, THREE_B

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
MODELS = {
    "qwen2.5-coder-0.5b": HALF_B,
    "qwen2.5-3b": THREE_B,
    "qwen2.5-7b": SEVEN_B,
    "qwen2.5-14b": FOURTEEN_B,
    "qwen2.5-32b": THIRTY_TWO_B,
    **{name: config for name, (config, _) in NEWER.items()},
}
ON_A_CPU = {"embedded", "letters", "tool_call", "grid_game", "smollm2"}
#: 4 updates per rollout and completions of 4096 tokens; the others 1 and 8192
SMALL = {"qwen2.5-3b", "qwen2.5-7b", "qwen3-4b", "qwen3-8b", "qwen3.5-9b", "llama3.1-8b"}
SHAPES = {name: shape_of(config) for name, config in MODELS.items()}
CARDS_GIB = (16, 24, 32, 48, 80, 141)
#: more than the longest prompt of GSM8K with Qwen's chat template and the system prompt
PROMPT = 512


def plan(name: str, gpu: Gpu, **changes) -> MemoryPlan:
    _, work = workload_of_file(CONFIGS / f"{name}.yaml", PROMPT)
    return plan_run(SHAPES[name], dataclasses.replace(work, **changes), gpu)


def header(name: str) -> str:
    """The line of a configuration about its smallest card."""
    plans = {card: plan(name, Gpu(card * 10**9)) for card in sorted(set(CARDS.values()))}
    smallest = min(card for card, made in plans.items() if made.fits)
    whole = plan(name, Gpu(10**15), gradient_checkpointing=True).peak / GIB
    cards = ", ".join(card for card, size in CARDS.items() if size == smallest)
    waves = f"{plans[smallest].work.completions} completions in {plans[smallest].waves} waves at the most"
    return (
        f"# Starts on a card of {smallest} GB ({cards}): {waves}\n"
        f"# (in one from {whole:.0f} GiB). Your card: qerl-trl plan --config {name} --card 'RTX 4090', or --gpu-gib N"
    )


def write_headers() -> None:
    for name in MODELS:
        path = CONFIGS / f"{name}.yaml"
        lines = [line for line in path.read_text().splitlines() if not line.startswith(("# Starts on", "# (in one"))]
        lines.insert(next(i for i, line in enumerate(lines) if not line.startswith("#")), header(name))
        path.write_text("\n".join(lines) + "\n")
    rows = (f'"{name}": {json.dumps(row)}' for name, row in shipped().items())
    (CONFIGS / "shapes.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


def shipped() -> dict[str, Any]:
    """Content of shapes.json: of each recipe its digest, its model's shape, and its workload."""
    found: dict[str, Any] = {}
    for name in [*MODELS, *sorted(ON_A_CPU - {"smollm2"})]:
        file = CONFIGS / f"{name}.yaml"
        model, work = workload_of_file(file, PROMPT)
        shape = SHAPES.get(name) or shape_of(CONFIGS.parents[1] / str(model))
        linears = [[*size, layers] for size, layers in Counter(shape.linears).items()]
        found[name] = {"model": model, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        found[name] |= {"shape": dataclasses.asdict(shape) | {"linears": linears}, "work": dataclasses.asdict(work)}
    return found


def test_a_shipped_recipe_is_planned_without_torch():
    assert json.loads((CONFIGS / "shapes.json").read_text()) == json.loads(json.dumps(shipped()))
    words = ["-m", "qerl_trl.cli.main", "plan", "--config", "qwen3.5-9b", "--card", "RTX 4090", "--json"]
    done = subprocess.run([sys.executable, "-X", "importtime", *words], capture_output=True, text=True)
    assert done.stderr and not re.search(r"\btorch$", done.stderr, re.MULTILINE)
    made = json.loads(json.dumps(dataclasses.asdict(plan("qwen3.5-9b", Gpu(24 * 10**9)))))
    assert json.loads(done.stdout) | made == json.loads(done.stdout)


def test_every_configuration_is_in_a_list():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*MODELS, *ON_A_CPU}
    for name in ON_A_CPU:
        values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        assert values["use_cpu"] is True and not values.get("use_vllm")


@pytest.mark.parametrize("gib", CARDS_GIB)
@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_starts_or_says_what_to_change(name, gib):
    made = plan(name, Gpu.of_gib(gib))
    if made.fits:
        made.check()
        assert made.peak <= gib * GIB and made.sequences >= 2
        assert made.engine_arguments()["kv_cache_memory_bytes"] <= made.kv_wanted
        return
    with pytest.raises(RuntimeError) as info:
        made.check()
    message = str(info.value)
    assert "It fits with" in message or "No setting was found that helps" in message
    assert not re.search(r"\bNone\b", message)


@pytest.mark.parametrize("name", MODELS)
def test_the_header_names_the_smallest_card_and_the_shape_is_the_models(name):
    assert f"{header(name)}\n" in (CONFIGS / f"{name}.yaml").read_text()
    if name in NEWER:
        assert SHAPES[name].parameters / 1e9 == pytest.approx(NEWER[name][1], rel=0.01)


@pytest.mark.parametrize("processes", [2, 4, 8])
@pytest.mark.parametrize("kind", ["data_parallel", "fsdp2", "zero2"])
def test_accelerate_reads_its_configurations(kind, processes, monkeypatch):
    name = f"{kind}_{processes}.yaml"
    read = load_config_from_file(str(CONFIGS.with_name("accelerate") / name))
    assert (read.num_processes, read.num_machines, read.mixed_precision) == (processes, 1, "bf16")
    assert read.distributed_type == {"data_parallel": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED"}[kind]
    if kind == "fsdp2":
        for key, value in read.fsdp_config.items():  # as `accelerate launch` does
            monkeypatch.setenv(key.upper(), str(value).lower() if isinstance(value, bool) else str(value))
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2 and plugin.cpu_ram_efficient_loading and plugin.reshard_after_forward
    if kind == "zero2":
        assert read.deepspeed_config["zero_stage"] == 2 and not read.deepspeed_config["zero3_init_flag"]


if __name__ == "__main__":
    write_headers()
