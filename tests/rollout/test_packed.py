"""Completions as arrays in a field of JSON: what is written is read, bit for bit, and nothing else is."""

import json
import math
import struct

import pytest

from qerl_trl.rollout.engine import Completion
from qerl_trl.rollout.packed import pack, unpack

PROMPTS = [[1, 2, 3], [151935]]
#: 0.1 and its like are no float32, which vLLM's log-probabilities are
LOGPS = [struct.unpack("<f", struct.pack("<f", value))[0] for value in (-0.1, -7.25e-12, -9999.0, 0.0)]


def travelled(prompts, completions) -> dict:
    return json.loads(json.dumps(pack(prompts, completions), allow_nan=False))


@pytest.mark.parametrize("per_prompt", [1, 2])
def test_every_bit_arrives(per_prompt):
    completions = [Completion([], []), Completion([0], LOGPS[:1]), Completion([5, 2**31 - 1, 7, 8], LOGPS)]
    completions = (completions * 2)[: 2 * per_prompt]
    prompts, found = unpack(travelled(PROMPTS, completions))
    assert prompts == PROMPTS and found == completions
    assert all(type(token) is int for c in found for token in c.tokens)
    assert all(type(logp) is float for c in found for logp in c.logps)


def test_what_json_has_no_word_for_arrives():
    _, [found] = unpack(travelled([[1]], [Completion([1, 2, 3], [math.nan, -math.inf, -1.0])]))
    assert math.isnan(found.logps[0]) and found.logps[1:] == [-math.inf, -1.0]


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": [3]},
        {"lengths": [3, -1]},
        {"lengths": [1, 0]},
        {"lengths": None},
        {"tokens": "AAAA"},
        {"tokens": "no base64"},
        {"logps": ""},
        {"prompt_lengths": [1, 1, 2], "lengths": [1, 1]},
    ],
    ids=str,
)
def test_what_was_not_packed_so_is_refused(change):
    good = travelled(PROMPTS, [Completion([1], [-1.0]), Completion([2], [-1.0])])
    with pytest.raises((ValueError, TypeError)):
        unpack(good | change)
    for key in good:
        with pytest.raises(KeyError):
            unpack({name: value for name, value in good.items() if name != key})


def test_a_token_id_beyond_int32_is_an_error():
    with pytest.raises(OverflowError):
        pack([[1]], [Completion([2**31], [-1.0])])
