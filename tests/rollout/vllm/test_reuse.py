"""Attention states of earlier weights are noticed, and honest reuse is not."""

import random

import pytest

pytest.importorskip("vllm")

from vllm.outputs import CompletionOutput, RequestOutput

from qerl_trl.rollout.engine import RolloutError
from qerl_trl.rollout.vllm.reuse import PrefixReuse

BLOCK = 4


def answer(prompt, cached, *completions):
    outputs = [CompletionOutput(i, "", c, None, None) for i, c in enumerate(completions or [(7, 8)])]
    return RequestOutput("0", None, list(prompt), None, outputs, True, num_cached_tokens=cached)


class Cache:
    """vLLM's: whole blocks, found by what is before them; at least one token of a prompt is computed."""

    def __init__(self):
        self.blocks = set()

    def run(self, prompts, draw):
        outputs = []
        for prompt in prompts:
            found = 0
            while found + BLOCK < len(prompt) and prompt[: found + BLOCK] in self.blocks:
                found += BLOCK
            completion = tuple(draw.randrange(3) for _ in range(draw.randrange(1, 9)))
            whole = (*prompt, *completion)
            self.blocks |= {whole[:end] for end in range(BLOCK, len(whole) + 1, BLOCK)}
            outputs.append(answer(prompt, found, completion))
        draw.shuffle(outputs)
        return outputs


@pytest.mark.parametrize("seed", range(50))
def test_honest_reuse_is_none_of_it(seed):
    """Groups of equal prompts, common beginnings, several turns, several calls between two updates."""
    draw, reuse = random.Random(seed), PrefixReuse()
    for _ in range(4):
        cache = Cache()
        reuse.changed()
        turns = [tuple(draw.randrange(3) for _ in range(draw.randrange(1, 20))) for _ in range(6)] * 2
        for _ in range(3):
            outputs = cache.run(turns, draw)
            reuse.check(outputs)
            turns = [(*o.prompt_token_ids, *o.outputs[0].token_ids, draw.randrange(3)) for o in outputs]


@pytest.mark.parametrize("seed", range(50))
def test_a_cache_that_is_not_reset(seed):
    draw, reuse, cache = random.Random(seed), PrefixReuse(), Cache()
    prompts = [tuple(draw.randrange(1000) for _ in range(draw.randrange(9, 20))) for _ in range(6)]
    reuse.check(cache.run(prompts * 2, draw))
    reuse.check(cache.run(prompts * 2, draw))
    reuse.changed()
    with pytest.raises(RolloutError, match=r"not reset.*enable_prefix_caching"):
        reuse.check(cache.run([prompts[0], tuple(range(2000, 2016))] * 2, draw))


def test_one_beginning_for_all():
    """A system prompt that all share: none can say which was first, all together can."""
    reuse = PrefixReuse()
    prompts = [(*range(8), 10 + i, 11) for i in range(3)]
    reuse.check([answer(p, 0 if i == 1 else 8) for i, p in enumerate(prompts)])
    reuse.changed()
    with pytest.raises(RolloutError, match="at most 0"):
        reuse.check([answer(p, 8) for p in prompts])


class Token(int):
    """Counts how often tokens are compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Token.compared += 1
        return int(self) == int(other)

    def __lt__(self, other):
        Token.compared += 1
        return int(self) < int(other)


def test_the_turns_of_a_task_do_not_get_slower():
    """What earlier turns computed is not sorted again: the twelfth call of one rollout compares about as much as the second."""
    draw, reuse, counts = random.Random(0), PrefixReuse(), []
    for _ in range(12):
        prompts = [tuple(Token(draw.randrange(2**20)) for _ in range(4)) for _ in range(64)]
        Token.compared = 0
        reuse.check([answer(prompt, 0) for prompt in prompts])
        counts.append(Token.compared)
    assert counts[11] < 2 * counts[1]


def test_engines_that_say_nothing():
    reuse = PrefixReuse()
    reuse.check([answer((1, 2, 3), None), object()])
    reuse.check([])


def test_completions_of_one_prompt_reuse_each_other():
    """vLLM says of them what the last one to end has reused, which the first one computed."""
    reuse, prompt = PrefixReuse(), tuple(range(40))
    reuse.check([answer(prompt, 32, (7, 8), (7, 9))])
    reuse.check([answer((*prompt, 7, 8, 1), 40)])
    with pytest.raises(RolloutError):
        reuse.check([answer((*range(100, 140), 1), 32)])


def test_what_was_given_up_does_not_answer_the_next_call(monkeypatch):
    """At ab98d3d two new prompts got the completions of two that a limit of time had ended."""
    from types import SimpleNamespace

    from vllm import LLM

    from qerl_trl.rollout.vllm.reuse import WatchedLLM

    aborted = []
    llm = WatchedLLM.__new__(WatchedLLM)
    llm.reuse, llm._group = PrefixReuse(), None
    llm.reset_prefix_cache = lambda reset_connector: aborted.append(reset_connector) or True
    llm.reuse.check([answer((1, 2, 3), 0)])
    llm.llm_engine = SimpleNamespace(
        output_processor=SimpleNamespace(request_states={"3": None, "4": None}),
        abort_request=lambda ids, internal: aborted.append((ids, internal)),
    )

    def hangs(self, *args, **kwargs):
        raise KeyboardInterrupt

    for name in ("generate", "chat"):
        monkeypatch.setattr(LLM, name, hangs)
        with pytest.raises(KeyboardInterrupt):
            getattr(llm, name)([])
    assert aborted == [(["3", "4"], True), True] * 2
    assert not llm.reuse._computed  # as the cache
