"""benchmarks/learning.py: statistics, choices, resume and report, on made-up records."""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import common
import evidence
import learning
import protocol as protocols
from protocol import Planned, Protocol

PROTOCOL, TASK = Protocol(evidence.PROTOCOL), "gsm_symbolic"
NOISES = list(PROTOCOL.noises)


def record(run, solved, parts=("validation",), **more):
    digits = {"before": "0" * 10, "after": protocols.encoded([True] * solved + [False] * (40 - solved))}
    curves = {"reward": [0.1, 0.2] * 10, "entropy": [0.3] * 30, "zero_variance": [0.5] * 20, "mismatch_kl": [1e-3]}
    return {
        "stage": run.stage, "task": run.task, "arm": run.arm, "noise": run.noise, "learning_rate": run.rate,
        "seed": run.seed, "seconds": 300.0, "eval_seconds": 100.0, "side_by_side": 8, "gpus": 2, "commit": "abc",
        "device": "GPU", "attempts": 1, "steps": 40, "command": "c", "curves": curves | {"seconds": [2.0] * 40},
        "model": {}, "problems_sha256": {}, "base_sha256": PROTOCOL.base(run.arm), "marks": {"ready_s": 60.0},
        "problems": dict.fromkeys(parts, 40), "answers": dict.fromkeys(parts, digits),
    } | more  # fmt: skip


def tuned(arm, noise, rate, solved):
    run = Planned("rates", TASK, arm, noise, rate, 0)
    return {run.name: record(run, solved)}


def test_seeds_and_problems_are_both_random():
    seeds = evidence.crossed([[0] * 50, [1] * 50, [0] * 50])  # problems alike: a t test
    assert seeds["high"] == pytest.approx(1 / 3 + 4.303 / 3, abs=1e-3) and seeds["p"] == pytest.approx(0.4226, abs=1e-3)
    problems = [1, -1, 0, 0, 1] * 40
    same = evidence.crossed([problems] * 3)  # seeds alike: the interval of one seed
    assert same["high"] - same["mean"] == pytest.approx(1.96 * math.sqrt(0.56 / 199), rel=1e-3)
    both = evidence.crossed([problems, [1 - abs(each) for each in problems], problems])
    assert both["high"] - both["low"] > same["high"] - same["low"] and 2 <= both["df"] < 100


def test_holm_the_smallest_difference_and_the_race():
    assert evidence.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert evidence.smallest(5, 1000, 0.02, 0.3, 0.8) == pytest.approx(3.717 * math.sqrt(8e-5 + 3e-4), rel=1e-3)
    points = [(1, 0.2), (2, 0.41), (3, 0.39), (4, 0.4), (5, 0.45)]  # two checkpoints in a row
    assert evidence.minutes_to(points, 0.4) == 4 and evidence.minutes_to(points, 0.45) is None


def test_noise_then_rate_are_chosen_on_validation_by_seed_0():
    known = {}
    for noise, solved in zip(NOISES, (10, 20, 20), strict=True):
        known |= tuned("nvfp4-noise", noise, 3e-5, solved)
    runs, missing = PROTOCOL.planned("rates", known, {})
    assert {run.noise for run in runs} == {"none", NOISES[1]}  # the first of two equal ones
    assert missing[0].startswith("bf16-noise waits") and PROTOCOL.planned("test", known, {})[0] == []
    for rate, solved in zip(PROTOCOL.rates, (5, 20, 30), strict=True):
        known |= tuned("nvfp4-noise", NOISES[1], rate, solved)
    runs, _ = PROTOCOL.planned("test", known, {})
    assert [(run.rate, run.noise, run.seed) for run in runs] == [(1e-4, NOISES[1], seed) for seed in (1, 2, 3)]
    assert PROTOCOL.options(runs[0])["eval_problems"] == 1800


def test_the_second_task_is_the_first_that_passes():
    row = {"problems": 300, "greedy": 0.3, "greedy_of_sampled": 0.3, "pass_16": 0.59}
    assert PROTOCOL.second({"zebra_puzzles": row, "letter_counting": row | {"pass_16": 0.6}}) == "letter_counting"
    assert not PROTOCOL.passes(row | {"pass_16": 0.9, "greedy": 0.51})


@pytest.fixture
def session(tmp_path):
    given = {"protocol": evidence.PROTOCOL, "stages": ["noise"], "gpus": [0], "parallel": 1, "seconds": 1000.0}
    given |= {name: tmp_path / name for name in ("tasks", "work", "out")} | {"model": None, "cpu": True, "lease": None}
    (tmp_path / "tasks" / TASK).mkdir(parents=True)
    for part in ("train", "held_out"):
        (tmp_path / "tasks" / TASK / f"{part}.jsonl").write_text("{}\n")
    return learning.Session(argparse.Namespace(**given))


def test_a_recorded_run_is_left_out_and_a_begun_one_is_first(session):
    known = tuned("bf16-noise", NOISES[0], 3e-5, 1)
    assert learning.next_run(session, known, set()).noise == NOISES[1]
    (begun,) = tuned("nvfp4-noise", NOISES[2], 3e-5, 1)
    (session.work / begun / "run/checkpoint-20").mkdir(parents=True)
    session.args.lease = 350.0  # half a run
    assert learning.next_run(session, known, set()).name == begun
    assert learning.next_run(session, known, {begun}) is None
    session.args.lease, session.began = None, time.monotonic() - 1000
    assert learning.next_run(session, known, set()) is None


def test_an_interrupted_run_is_resumed_and_a_finished_one_is_not_trained_again(session, monkeypatch):
    run, calls = Planned("noise", TASK, "nvfp4-noise", NOISES[0], 3e-5, 0), []

    def call(command, look, **environment):
        calls.append(command)
        look("step 1 of 110", 7.0)
        folder = Path(command[command.index("--output_dir") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        if len(calls) == 1:
            return -9, ["killed"], {}
        log = [{"entropy": 0.123456, "step_time": 2.0}] * 110 + [{"train_runtime": 1.0}]
        results = {"log_history": log, "steps": 110, "device": "CPU", "versions": {}, "base": {"sha256": "ab"}}
        files = {
            "results": results,
            "before": {"correct": [False] * 300},
            "after": {"correct": [True] * 120 + [False] * 180},
        }
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return 0, ["done"], {"ready_s": 5.0}

    monkeypatch.setattr(session, "call", call)
    with pytest.raises(RuntimeError, match="killed"):
        learning.train(session, run, 0)
    found = learning.train(session, run, 0)
    assert calls[0] == calls[1] and str(session.work / run.name / "run") in calls[0]
    assert (found["attempts"], found["seconds"]) == (2, 14.0) and protocols.accuracy(found, "validation") == 0.4
    again = learning.train(session, run, 0)
    assert again | {"eval_seconds": found["eval_seconds"]} == found and len(calls) == 2


def test_the_report_is_made_from_the_records_alone(tmp_path):
    assert not evidence.Evidence(folder=tmp_path).plots()
    for arm in ("bf16", "nvfp4-noise", "nvfp4"):
        for seed in (1, 2):
            run, solved = Planned("test", TASK, arm, "none", 1e-5, seed), 5 + seed + 10 * (arm != "bf16")
            row = record(run, solved, ("validation", "test", "unseen"), sampled=[4] * 5)
            common.save(row, tmp_path / f"{run.name}.json", compact=True)
    race = {"side_by_side": 1, "checkpoints": [[10, "ffff"], [20, "fffff"]]}
    common.save(record(Planned("race", TASK, "bf16", "none", 1e-5, 1, True), 9, **race), tmp_path / "race.json")
    once, again = (evidence.Evidence(folder=tmp_path) for _ in range(2))
    texts = {name: make() for name, make in once.tables().items()}
    assert texts == {name: make() for name, make in again.tables().items()} and once.plots() == again.plots()
    tables = [text for text in texts.values() if text.startswith("|")]
    assert len(once.plots()) == 5 and len(tables) == 6 and all("4-bit GGUF" in text for text in tables)
    assert "| nvfp4-noise - bf16* (primary) | 2 | +25.0 (+12." in texts["evidence_comparisons"]
    common.save(
        json.loads((tmp_path / "race.json").read_text()) | {"problems_sha256": "other"}, tmp_path / "other.json"
    )
    with pytest.raises(ValueError, match="not comparable"):
        evidence.Evidence(folder=tmp_path)
    assert "| bf16* | 25.0 | 100.0 |" in texts["evidence_explored"] and "| bf16* | 1 | 1.3 |" in texts["evidence_race"]
