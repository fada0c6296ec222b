"""Objects by name, as a YAML file or a command line says them: `file.py:function`, `package.module:function`, or TRL's `package.module.function`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_HOW = "Name it as file.py:function or package.module:function."


def found(name: str, folders: list[Path]) -> Path | None:
    """The file or folder `name` as seen from the first of `folders` in which it is; `None` if it is in none."""
    return next((place for folder in folders if (place := folder / name).exists()), None)


def in_words(folders: Sequence[Path]) -> str:
    """Where something was looked for, each place once."""
    return ", ".join(dict.fromkeys(str(folder.resolve()) for folder in folders))


def function_named(name: str, option: str, folders: list[Path] | None = None) -> Callable[..., Any]:
    """The function or class that `name` says; a file is looked for in `folders`, by default in the working directory.

    Raises:
        `ValueError`: there is none, with `option` as what the user wrote it for.
    """
    place, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not place:
        raise ValueError(f"{option}={name!r} is no function. {_HOW}")
    folders = folders or [Path()]
    try:
        module = _of_file(place, folders) if place.endswith(".py") else _of_module(place, folders)
    except (ImportError, OSError) as error:
        raise ValueError(f"{option}={name!r} cannot be found: {error}. {_HOW}") from error
    if not hasattr(module, attribute):
        own = {
            each: value for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        }
        there = [each for each, value in own.items() if callable(value) and not each.startswith("_")]
        raise ValueError(
            f"{option}={name!r} cannot be found: {place} has no {attribute!r}, but {', '.join(there[:20]) or 'no function'}. {_HOW}"
        )
    value = getattr(module, attribute)
    if not callable(value):
        raise ValueError(f"{option}={name!r} is {value!r}, no function of that kind. {_HOW}")
    return value


def _of_module(place: str, folders: list[Path]) -> ModuleType:
    """An installed module, or where there is none of that name a file of it in one of `folders`."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        file = f"{place.replace('.', '/')}.py"
        if error.name != place.split(".")[0] or found(file, folders) is None:
            raise
        return _of_file(file, folders)


def _of_file(place: str, folders: list[Path]) -> ModuleType:
    file = found(place, folders)
    if file is None:
        raise FileNotFoundError(f"there is no {place} in {in_words(folders)}")
    file = file.resolve()
    name = f"_qerl_task_{abs(hash(file))}"  # the same module for each function of a file
    if name in sys.modules:
        return sys.modules[name]
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) and Path(main.__file__ or "").resolve() == file:
        return main
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "of a path that ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    beside = str(file.parent)
    sys.path.insert(0, beside)  # what a script that is run sees: the modules beside it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(beside)
    return module
