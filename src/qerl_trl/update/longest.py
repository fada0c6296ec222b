"""Before a pass with more tokens than any before it: give back what torch's allocator keeps from the shorter ones.

The allocator keeps freed blocks and gives them to requests that are no larger. What a layer keeps for the backward pass grows with the tokens
of its row, and rows have another length each time, so the blocks of all shorter rows are too small for a longer one: every new longest row
takes the memory of its largest tensors anew, beside blocks that nothing fits into. Ragged completions of 7B reserved half as much again as
they allocated (`ours-7b-ragged` in examples/benchmarks/results/step_h200.json, measured without this; tests/update/test_longest.py computes
the same numbers from the lengths), more than the plan has for pieces. In the other direction it fits: a shorter row takes the blocks of the
longest. So it is enough to begin with an empty cache there, which happens less and less often: about ln(n) times in n passes.
"""

import torch


class LongestPass:
    """The most tokens that went through a model forward and backward at a time."""

    def __init__(self) -> None:
        self.tokens = 0

    def begin(self, tokens: int, device: torch.device) -> None:
        """Before a forward pass of so many tokens, with or without gradients: nothing is kept of one without."""
        if not torch.is_grad_enabled() or tokens <= self.tokens:
            return
        self.tokens = tokens
        if device.type == "cuda":
            torch.cuda.empty_cache()
