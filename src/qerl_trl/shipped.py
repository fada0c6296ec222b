"""The files that come with the package: example scripts, recipes, tasks, the embedded models."""

from pathlib import Path


def examples_folder() -> Path:
    """Where they are: in the wheel, or in a source checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "examples", package.parents[1] / "examples"):
        if (folder / "grpo_gsm8k.py").is_file():
            return folder
    raise RuntimeError(f"examples/grpo_gsm8k.py is neither in {package} nor in a source checkout. Reinstall qerl-trl.")


def config_file(name: str) -> Path:
    """A recipe: a YAML file, or the shipped one of that name."""
    return _named(name, "configs", "--config")


def task_file(name: str) -> Path:
    """A task: a YAML file, or the shipped one of that name."""
    return _named(name, "tasks", "--task")


def _named(name: str, kind: str, option: str) -> Path:
    examples = examples_folder()
    folder = examples / kind
    places = (Path(name), examples.parent / name, folder / name, folder / f"{name}.yaml")
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        shipped = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise ValueError(f"{option} {name} is no file, and not one of the shipped ones: {shipped}.")
    return found
