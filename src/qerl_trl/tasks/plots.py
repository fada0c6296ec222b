"""Training curves of a run: reward, entropy and sigma over steps, as one PNG."""

import os
import re

try:
    import matplotlib
except ImportError as error:  # at import, not at the end of a run
    raise ImportError("Curves are drawn with matplotlib: pip install 'qerl-trl[plot]'.") from error

#: panel title -> (pattern of log keys, log-scaled axis); a panel without data is left out
_PANELS = {
    "reward": (r"reward|rewards/.+/mean", False),
    "policy entropy (nats per token)": (r"entropy|rollout/entropy", False),
    "noise sigma": (r"aqn/sigma|aqn/sigma_effective", True),
    "rollout/trainer KL (nats per token)": (r"rollout/mismatch_kl", True),
}


def plot_curves(log_history: list[dict], path: str | os.PathLike, title: str | None = None) -> None:
    """Draw the curves of `trainer.state.log_history` into the PNG `path`.

    Raises:
        `ValueError`: none of the curves is in the history.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {}
    logged = list(dict.fromkeys(key for entry in log_history for key in entry))
    for name, (pattern, log_scale) in _PANELS.items():
        curves = {}
        for key in (key for key in logged if re.fullmatch(pattern, key)):
            points = [(entry["step"], entry[key]) for entry in log_history if entry.get(key) is not None]
            if points and any(value for _, value in points):
                curves[key] = points
        if curves:
            panels[name] = (curves, log_scale)
    if not panels:
        raise ValueError(
            "There is no reward, entropy or sigma in the log history. logging_steps must not be larger than the run."
        )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.2), squeeze=False)
    for axis, (name, (curves, log_scale)) in zip(axes[0], panels.items(), strict=True):
        for index, (key, points) in enumerate(curves.items()):
            steps, values = zip(*points, strict=True)
            axis.plot(steps, values, label=key, linewidth=1.4, linestyle=("-", "--", ":", "-.")[index % 4])
        if log_scale:
            axis.set_yscale("symlog", linthresh=1e-5)
        axis.set(title=name, xlabel="step")
        axis.grid(alpha=0.3)
        if len(curves) > 1:
            axis.legend(fontsize=7)
    if title:
        figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
