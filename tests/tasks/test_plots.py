import importlib
import sys

import matplotlib.figure  # noqa: F401  (plots.matplotlib.figure)
import pytest

from qerl_trl.tasks import plots
from qerl_trl.tasks.plots import plot_curves


def test_png_is_written(tmp_path):
    history = [{"step": i, "reward": i / 5, "entropy": 1 - i / 5, "aqn/sigma": 10.0 ** -(2 + i)} for i in range(5)]
    path = tmp_path / "curves.png"
    plot_curves(history, path, title="run")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


def test_every_reward_has_its_own_curve(tmp_path, monkeypatch):
    history = [{"step": i, "reward": i, "rewards/polite/mean": i, "rewards/polite/std": i} for i in range(1, 5)]
    figure = plots.matplotlib.figure.Figure
    drawn, savefig = [], figure.savefig

    def watching(self, *args, **kwargs):
        drawn.extend(line.get_label() for axis in self.axes for line in axis.get_lines())
        savefig(self, *args, **kwargs)

    monkeypatch.setattr(figure, "savefig", watching)
    plot_curves(history, tmp_path / "curves.png")
    assert drawn == ["reward", "rewards/polite/mean"]


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no reward"):
        plot_curves([{"step": 1, "loss": 0.0}], tmp_path / "curves.png")


def test_a_missing_matplotlib_is_noticed_at_import_not_at_the_end_of_a_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"qerl-trl\[plot\]"):
        importlib.reload(plots)
