"""Find the package's scripts, recipes, tasks and embedded models, and read recipes and tasks."""

import ast
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

OPTIONS = "Options are the fields of QeRLConfig, of TRL's ModelConfig and of a task."
#: an argument in a docstring of Hugging Face's form: name (`type`, ...): description, indented
_ARGUMENT = re.compile(r"^    (\w+) \((.*?)\):\n((?:        .*\n|\n)+)", re.MULTILINE)
#: tag of `<<` in YAML
_MERGE = "tag:yaml.org,2002:merge"


def examples_folder() -> Path:
    """Return the folder of the examples, in the wheel or in a source checkout."""
    package = Path(__file__).resolve().parents[1]
    return folder if (folder := package / "examples").is_dir() else package.parents[1] / "examples"


def config_file(name: str) -> Path:
    """Find a recipe: a YAML file, or the shipped recipe of that name. Raises `ValueError` if there is none."""
    return _named(name, "configs", "--config")


def task_file(name: str, recipe: Path | None = None) -> Path:
    """Find a task: a YAML file, or the shipped task of that name. A recipe's task is first sought in its folder."""
    if recipe is None:
        return _named(name, "tasks", "--task")
    beside = recipe.parent / name
    return beside if beside.is_file() else _named(name, "tasks", f"{recipe}: task:", f" here or beside {recipe.name}")


def accelerate_file(name: str) -> Path:
    """Find a distributed setup: a YAML file of accelerate, or the shipped setup of that name."""
    return _named(name, "accelerate", "--accelerate_config")


def _named(name: str, kind: str, option: str, where: str = "") -> Path:
    examples = examples_folder()
    folder = examples / kind
    places = (Path(name), examples.parent / name, folder / name, folder / f"{name}.yaml")
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        shipped = sorted(path.stem for path in folder.glob("*.yaml"))
        raise ValueError(f"{option} {name} is no file{where}.{meant(name, shipped)} Shipped: {', '.join(shipped)}.")
    return found


def meant(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with similar names, or nothing."""
    near = difflib.get_close_matches(name, list(known), 3, 0.7)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def documented_options() -> dict[str, list[tuple[str, str, str]]]:
    """Return group -> (option, type and default, description) from the docstrings in config.py, not imported."""
    tree = ast.parse((Path(__file__).resolve().parents[1] / "config.py").read_text())
    texts = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef)}
    found: dict[str, list[tuple[str, str, str]]] = {}
    for text in (texts["QeRLArguments"], texts["QeRLConfig"]):
        for group in re.split(r"^    > ", f"{text}\n", flags=re.MULTILINE):
            title = "Further" if group == text or "Parameters:" in group else group.partition("\n")[0]
            for name, kind, what in _ARGUMENT.findall(group):
                found.setdefault(title, []).append((name, kind.replace("*optional*, ", ""), " ".join(what.split())))
    return found


def parser_of(kinds: Any, **options: Any) -> Any:
    """Make TRL's parser for these dataclasses, which raises `ValueError` instead of printing usage and exiting."""
    from trl import TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"{message}. {OPTIONS}")

    return Parser(kinds, **options)


def contents(file: Path) -> dict[str, Any]:
    """Read the names and values in a recipe or task. Raises `ValueError`: no YAML, no mapping, or a repeated name."""
    import yaml

    class Once(yaml.SafeLoader):
        """Loader that refuses repeated names; the standard loader silently takes the last value."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            lines: dict[str, int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise ValueError(
                        f"{file} sets {key.value} twice, in lines {lines[key.value]} and {line}. Remove one."
                    )
                lines[key.value] = line
            return super().construct_mapping(node, deep)

    try:
        found, why = yaml.load(file.read_text(), Once), "it has no fields"
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        found, why = error, str(error)
    if found is not None and not isinstance(found, dict):
        raise ValueError(
            f"{file} is no YAML of a run or a task: {why}. Write one `name: value` on each line; put a value with a "
            "colon, a brace or a bracket in quotes."
        )
    return found or {}
