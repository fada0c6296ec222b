# /// script
# requires-python = ">=3.11"
# dependencies = ["qerl-trl[math,track] @ git+https://github.com/qerl-trl/qerl-trl"]
# ///
"""A small game of several turns through TRL's `environment_factory`: walk to the treasure, avoid the pit.

    accelerate launch examples/grid_game.py                                        # minutes on a CPU
    qerl-trl train --task examples/tasks/grid_game.yaml --config grid_game

Each turn is a call of `move`; the answer has the new directions of treasure and pit. Noise is drawn once per
trajectory, not once per turn.
"""

import random

from qerl_trl import QeRLGRPOTrainer, Script, Task

FAR = 3  # maximum steps to the treasure along each axis
STEPS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


class Treasure:
    """The environment of one completion. `reset` gets the row of the data; other public methods are tools of the model.

    `treasure` and `pit` are (columns to the right, rows down) relative to the player.
    """

    def reset(self, treasure, pit, **row) -> str:
        self.treasure, self.pit = tuple(treasure), tuple(pit)
        return " " + self._seen()

    def move(self, direction: str) -> str:
        """
        Takes a step.

        Args:
            direction: up, down, left or right.
        """
        if self.over:
            return "The game is over."
        dx, dy = STEPS[direction]
        self.treasure, self.pit = ((x - dx, y - dy) for x, y in (self.treasure, self.pit))
        if self.over:
            return "You found it." if self.treasure == (0, 0) else "You fell."
        return self._seen()

    def get_reward(self) -> float:
        return float(self.treasure == (0, 0))

    @property
    def over(self) -> bool:
        return (0, 0) in (self.treasure, self.pit)

    def _seen(self) -> str:
        return f"Treasure: {way(self.treasure)}. Pit: {way(self.pit)}."


def way(place: tuple[int, int]) -> str:
    """(1, -2) is "2 up, 1 right"."""
    x, y = place
    parts = [(abs(y), "down" if y > 0 else "up"), (abs(x), "right" if x > 0 else "left")]
    return ", ".join(f"{steps} {direction}" for steps, direction in parts if steps)


def games(test: int = 200, seed: int = 0) -> dict[str, list[dict]]:
    """The data: treasures 2 to 5 steps away, pits on the way or next to it.

    The split is by the position of the pit relative to the treasure. Steps do not change it, so training never meets a
    position of a held-out game.
    """
    span = range(-FAR, FAR + 1)
    boards: dict[tuple[int, int], list[dict]] = {}
    for x, y in [(x, y) for x in span for y in span if 2 <= abs(x) + abs(y) <= 5]:
        for pit in [(px, py) for px in around(x) for py in around(y)]:
            if pit not in ((0, 0), (x, y)):
                row = {"prompt": "Find the treasure.", "treasure": (x, y), "pit": pit}
                boards.setdefault((pit[0] - x, pit[1] - y), []).append(row)
    order = random.Random(seed).sample(sorted(boards), len(boards))
    held_out: list[dict] = []
    while len(held_out) < test:
        held_out += boards.pop(order.pop())
    return {"train": [row for rows in boards.values() for row in rows], "test": held_out}


def around(steps: int) -> range:
    """From one step behind the player to one step beyond the treasure, along one axis."""
    return range(min(steps, 0) - 1, max(steps, 0) + 2)


# the reward is the environment's
TASK = Task(name="treasure on a grid", dataset_name=games, environment_factory=Treasure)

if __name__ == "__main__":
    script = Script.parse(TASK, config="grid_game")
    script.train(QeRLGRPOTrainer(**script.trainer_arguments()))
