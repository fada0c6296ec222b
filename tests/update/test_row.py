"""A padded batch as a row, and back: the computed tokens, their labels, and the place of each result."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_trl.update.row import MULTIPLE, build, rows, sequences


def padded(pairs):
    """TRL's input_ids, attention_mask (B, W) and L of (prompt, completion) pairs of token ids."""
    before, after = max(len(p) for p, _ in pairs), max(1, *(len(c) for _, c in pairs))
    ids = torch.zeros(len(pairs), before + after, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for line, (prompt, completion) in enumerate(pairs):
        ids[line, before - len(prompt) : before + len(completion)] = torch.tensor([*prompt, *completion])
        mask[line, before - len(prompt) : before + len(completion)] = 1
    return ids, mask, after


def test_the_drawing_of_the_module():
    p, a, b = [11, 12, 13], [21, 22, 23, 24, 25], [31, 32, 33]
    ids, mask, width = padded([(p, b), (p, a)])
    (chosen,) = rows(sequences(ids, mask, width))
    built = build(chosen, width, torch.device("cpu"))
    assert built.input_ids[0, :10].tolist() == [11, 12, 13, 21, 22, 23, 24, 13, 31, 32]
    assert built.position_ids[0, :10].tolist() == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4]
    assert built.shift_labels[0, :10].tolist() == [-100, -100, *a, *b]
    assert built.segments.packed_keys[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 7, 8, 9]
    assert (built.segments.packed_keys[12:] >= 10).all()  # the padding reads itself only
    assert built.segments.cu_seq_lens_q.tolist() == [0, 7, 10, MULTIPLE]
    assert built.segments.cu_seq_lens_k.tolist() == [0, 7, 12, 2 * MULTIPLE]
    assert built.destination.tolist() == [5, 6, 7, 8, 9, 0, 1, 2]
    assert built.scored.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert built.measured.tolist() == [2, 3, 4, 5, 6, 2, 8, 9], "the entropy after the prompt is one number"


PAIRS = st.lists(
    st.tuples(st.sampled_from([(5,), (5, 6), (7, 8, 9)]).map(list), st.lists(st.integers(1, 9), max_size=6)),
    min_size=1,
    max_size=9,
)


@settings(deadline=None, max_examples=60)
@given(PAIRS, st.booleans(), st.sampled_from([{}, {"limit": 12}, {"count": 2}]))
def test_every_completion_token_is_scored_once_and_sees_its_own_sequence(pairs, share, cut):
    ids, mask, width = padded(pairs)
    answers = torch.full((len(pairs) * width,), -1)
    for chosen in rows(sequences(ids, mask, width), **cut, share=share):
        assert len(chosen) <= cut.get("count", len(chosen))
        built = build(chosen, width, torch.device("cpu"), share=share)
        tokens, asked = built.input_ids[0], built.shift_labels[0]
        assert len(tokens) % MULTIPLE == 0
        if "limit" in cut and len(chosen) > 1:
            assert built.segments.cu_seq_lens_q[-2] <= cut["limit"]
        assert (answers[built.destination] == -1).all()
        answers[built.destination] = asked[built.scored]
        cu_q, cu_k, max_q, max_k, keys = built.segments
        keys = torch.arange(len(tokens)) if keys is None else keys
        assert len(keys) % MULTIPLE == 0 and cu_q[-1] == len(tokens) and cu_k[-1] == len(keys)
        for s, sequence in enumerate(chosen):
            seen = keys[cu_k[s] : cu_k[s + 1]]
            whole = [*sequence.prompt, *sequence.completion]
            assert tokens[seen].tolist() == whole[: len(seen)]
            assert len(seen) == max(len(whole) - 1, len(sequence.prompt))
            assert built.position_ids[0, seen].tolist() == list(range(len(seen)))
            assert seen[-1] == cu_q[s + 1] - 1  # both end with the same token
            assert cu_q[s + 1] - cu_q[s] <= max_q and len(seen) <= max_k
    for line, (_, completion) in enumerate(pairs):
        expected = completion + [-1] * (width - len(completion))
        assert answers[line * width : (line + 1) * width].tolist() == expected
