"""The documentation: it builds, its links lead somewhere, its code compiles, its quotes are in the source."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from qerl_trl import QeRLConfig
from qerl_trl.checks.learning import SignalMonitor
from qerl_trl.rollout.mismatch import _MISSING, MismatchWatch

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "source"
PAGES = sorted(DOCS.glob("*.md"))
ids = {"ids": lambda path: path.stem}
#: limits and settings with a unit
DEFINED = {*(f"{n} times" for n in (3, 3.5, 10, 25)), *(f"{n} %" for n in (1, 25, 50, 80, 95)), "1800 s", "0.005 nats"}


def anchors(page: Path) -> set[str]:
    """Of the page's headings, as GitHub and doc-builder make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_table_of_contents_names_every_page_once():
    chapters = yaml.safe_load((DOCS / "_toctree.yml").read_text())
    named = [section["local"] for chapter in chapters for section in chapter["sections"]]
    assert sorted(named) == sorted(page.stem for page in PAGES)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], **ids)
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\((?!\w+://)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        assert target.exists(), f"{link}: as a file, which is how GitHub shows it; doc-builder takes .md away"
        if anchor:
            assert anchor in anchors(target), link


def test_it_builds(tmp_path):
    command = [sys.executable, "-c", "from doc_builder.commands.doc_builder_cli import main; main()"]
    command += f"build qerl_trl {DOCS} --build_dir {tmp_path} --version main --repo_owner qerl-trl".split()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    built = {path.stem for path in tmp_path.rglob("*.mdx")}
    assert built >= {page.stem for page in PAGES}
    api = next(tmp_path.rglob("api.mdx")).read_text()
    for name in ("QeRLGRPOTrainer", "aqn_sigma_start", "NVFP4Config", "AQNCallback"):
        assert name in api


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], **ids)
def test_measurements_are_filled_in_by_a_script(page):
    """A number with a unit is in a block of benchmarks/tables.py, or one of `DEFINED`."""
    prose = re.sub(r"<!-- begin: .*?<!-- end|```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    typed = re.findall(r"\b\d[\d.,]*[ -]?(?:[mu]?s|[GMK]i?B|%|times|points?|nats|fold)(?![\w-])", prose)
    assert set(typed) <= DEFINED


@pytest.mark.parametrize("page", PAGES, **ids)
def test_code_compiles(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, page.name, "exec")


def test_messages_in_troubleshooting_are_the_real_ones():
    source = " ".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r'"\s*f?"', "", re.sub(r"\{[^{}]*\}", "...", source))  # f-strings without their values
    messages = (DOCS / "troubleshooting.md").read_text().partition("## It runs")[0]
    quoted = re.findall(r"^\| (`[^|]*`) \|", messages, re.MULTILINE)
    messages = [text for cell in quoted for text in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) >= 10
    for part in (part.strip() for message in messages for part in message.split("...")):
        assert part in source, part


def metrics() -> dict[str, str]:
    """Rows of the table of metrics by key."""
    page = (DOCS / "troubleshooting.md").read_text().partition("## What is logged")[2]
    rows = re.findall(r"^\| (`.*?)$", page, re.MULTILINE)
    return {key: row for row in rows for key in re.findall(r"`([^`]+)`", row.partition(" | ")[0])}


def test_healthy_ranges_are_the_limits_of_the_guards():
    rows, default = metrics(), {field.name: field.default for field in dataclasses.fields(QeRLConfig)}
    stop, in_a_row = MismatchWatch.STOP, f"in {MismatchWatch.PERSISTENT} rollouts in a row"
    threshold = default["rollout_mismatch_threshold"]
    for words in (f"below {threshold / stop:g} without noise", f"({threshold:g})", f"1/{stop} of it", f"{stop} times"):
        assert words in rows["rollout/mismatch_kl"]
    for words in (f"within {MismatchWatch.CERTAIN} standard errors", f"1/{stop} of", f"{stop} times that"):
        assert words in rows["rollout/logp_gap"]
    assert in_a_row in rows["rollout/mismatch_kl"] and in_a_row in rows["rollout/logp_gap"]
    assert f"more than {100 * _MISSING:g} % of" in rows["rollout/nan_logps"]
    for key, kind in (("entropy", "entropy"), ("completions/clipped_ratio", "clipped")):
        limit, streak = SignalMonitor.LIMITS[kind]
        assert f"{100 * limit:g} % " in rows[key] and f"{streak} " in rows[key]
    assert f"`zero_advantage_patience` ({default['zero_advantage_patience']})" in rows["frac_reward_zero_std"]


def test_what_upstream_is_asked_for_names_tests_that_are_there():
    page = (DOCS / "upstream.md").read_text()
    watched = re.findall(r"^Watched by `([^`]+)`", page, re.MULTILINE)
    assert len(watched) >= 5
    for path, _, test in (name.partition("::") for name in watched):
        assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE), (path, test)
    projects = set(re.findall(r"^\| (\w+) \| ", page, re.MULTILINE)) - {"project"}
    assert projects == set(re.findall(r"^### (\w+): ", page, re.MULTILINE))  # each has a text
