"""Versions of vLLM."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from qerl_trl.rollout.vllm import plugin

ROOT = Path(__file__).resolve().parents[3]


def test_one_window_of_versions():
    """In pyproject.toml, in the plug-in, and in this environment."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (vllm,) = (Requirement(line) for line in extras["vllm"] if Requirement(line).name == "vllm")
    assert {str(part) for part in vllm.specifier} == {f">={plugin.OLDEST_VLLM}", f"<={plugin.NEWEST_VLLM}"}
    plugin.check_vllm()
