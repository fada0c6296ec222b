# /// script
# requires-python = ">=3.11"
# dependencies = ["qerl-trl[math,plot,track] @ git+https://github.com/qerl-trl/qerl-trl"]
# ///
"""A small game of several turns, through TRL's `environment_factory`: walk to the treasure, not into the pit. Minutes on a CPU.

    accelerate launch examples/grid_game.py
    qerl-trl train --task examples/tasks/grid_game.yaml --config grid_game

Each turn is a call of `move`; the noise is drawn once per trajectory, not once per turn.
"""

import random

from qerl_trl import QeRLGRPOTrainer
from qerl_trl.tasks.script import Script
from qerl_trl.tasks.task import Task

SIZE = 4
STEPS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


class Treasure:
    """The environment: TRL makes one per completion. `reset` gets the row of the data, the other public methods are the model's tools."""

    def reset(self, start, treasure, pit, **row) -> str:
        self.place, self.treasure, self.pit = tuple(start), tuple(treasure), tuple(pit)
        self.over = False
        return f" Treasure {self._at(treasure)}, pit {self._at(pit)}. You are {self._at(start)}."

    def move(self, direction: str) -> str:
        """
        Takes a step.

        Args:
            direction: up, down, left or right.
        """
        if self.over:
            return "The game is over."
        dx, dy = STEPS[direction]
        x, y = self.place
        self.place = (min(max(x + dx, 0), SIZE - 1), min(max(y + dy, 0), SIZE - 1))
        self.over = self.place in (self.treasure, self.pit)
        if self.over:
            return "You found it." if self.place == self.treasure else "You fell."
        return f"You are {self._at(self.place)}."

    def get_reward(self) -> float:
        return float(self.place == self.treasure)

    @staticmethod
    def _at(place) -> str:
        return f"at {place[0]} {place[1]}"


def games(train: int = 1000, test: int = 200, seed: int = 0) -> dict[str, list[dict]]:
    """The data: three places of the grid, at least two steps from start to treasure; no game is on both sides."""
    rng = random.Random(seed)
    seen: dict = {}
    cells = [(x, y) for x in range(SIZE) for y in range(SIZE)]
    while len(seen) < train + test:
        start, treasure, pit = rng.sample(cells, 3)
        if abs(start[0] - treasure[0]) + abs(start[1] - treasure[1]) >= 2:
            seen[start, treasure, pit] = None
    rows = [{"prompt": "Find the treasure.", "start": s, "treasure": t, "pit": p} for s, t, p in seen]
    return {"train": rows[:train], "test": rows[train:]}


TASK = Task(
    name="treasure on a grid", dataset_name=games, environment_factory=Treasure
)  # the reward is the environment's own

if __name__ == "__main__":
    script = Script.parse(TASK, config="grid_game")
    script.train(QeRLGRPOTrainer(**script.trainer_arguments()))
