"""`qerl-trl doctor`: versions, problems and notes."""

import importlib.metadata
import json

import torch

from qerl_trl.checks import environment
from tests.faults.tiny_runs import call


def test_doctor(monkeypatch):
    monkeypatch.setattr(environment, "vllm_problems", lambda: [])  # imports vLLM: tests/faults/test_r1_environment.py
    code, out, _ = call("doctor", "--json")
    result = json.loads(out)
    assert result["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]  # metadata may omit "+cu130"
    assert code == (1 if any(problem["fatal"] for problem in result["problems"]) else 0)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0" if name == "trl" else real(name))
    assert "Newer than this package was tested with: trl 99.0" in call("doctor")[1]  # a note, no refusal
