"""What is asked of an engine is looked at before."""

import logging
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import PartialState

from qerl_trl.rollout import requests
from qerl_trl.rollout.engine import RolloutError
from tests.ranks import on_ranks


def asking(mode="server", parallel=1, processes=2, rollout_func=print):
    args = SimpleNamespace(vllm_mode=mode, vllm_tensor_parallel_size=parallel)
    trainer, accelerator = (
        SimpleNamespace(args=args, rollout_func=rollout_func),
        SimpleNamespace(num_processes=processes),
    )
    return SimpleNamespace(trainer=trainer, accelerator=accelerator, mode=mode, tp_group=None)


@pytest.mark.parametrize("option", [{"mode": "server"}, {"mode": "colocate", "parallel": 2}], ids=str)
def test_one_engine_of_several_processes_is_asked_by_all_for_as_many(option):
    """TRL deals completions out by each process's own number: with 2 and 1 prompts the second would get the first one's second."""

    def work(rank):
        PartialState(cpu=True)
        generation = asking(**option)
        requests.check_shares(generation, 2)
        try:
            requests.check_shares(generation, 2 - rank)
        except RolloutError as error:
            return str(error)

    for outcome in on_ranks(2, work):
        assert "different numbers of prompts, 2, 1:" in outcome.answer and "`complete`" in outcome.answer


def test_engines_of_two_processes_each_are_asked_for_themselves():
    def work(rank):
        PartialState(cpu=True)
        generation = asking("colocate", parallel=2, processes=4)
        generation.tp_group, _ = torch.distributed.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        requests.check_shares(generation, 2 if rank < 2 else 3)  # TRL deals within each engine
        try:
            requests.check_shares(generation, 2 if rank < 2 else rank)
        except RolloutError as error:
            return str(error)

    answers = [outcome.answer for outcome in on_ranks(4, work)]
    assert answers[:2] == [None, None] and all("numbers of prompts, 2, 3:" in answer for answer in answers[2:])


@pytest.mark.parametrize(
    "others",
    [{"mode": "colocate"}, {"rollout_func": None}, {"processes": 1}],
    ids=["an engine in each", "TRL's own turns", "one process"],
)
def test_where_numbers_cannot_differ_nobody_is_asked(others, monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_gather_object", None)
    requests.check_shares(asking(**others), 3)


@pytest.mark.parametrize(
    ("limit", "said"), [(None, None), (8, None), (7, "cut off"), (5, "longest prompt has 5 tokens")]
)
def test_prompts_have_to_fit_the_engine(limit, said, caplog):
    with caplog.at_level(logging.WARNING):
        if limit == 5:
            with pytest.raises(ValueError, match=said):
                requests.check_lengths([[1] * 5, [1]], 3, limit)
        else:
            requests.check_lengths([[1] * 5, [1]], 3, limit)
            assert (said is None) == (not caplog.records) and (said or "") in caplog.text
