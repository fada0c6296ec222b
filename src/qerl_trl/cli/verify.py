"""`qerl-trl doctor --verify FOLDER`: a model, export, run or checkpoint folder read whole, byte for byte and value for value."""

from pathlib import Path

from .. import checkpoint
from ..nvfp4 import headers
from ..preflight import Problem


def verify(folder: Path) -> tuple[str, list[Problem]]:
    """What was found in a line, and what is wrong."""
    if not folder.is_dir():
        return str(folder), [
            Problem(f"{folder} is not a folder.", "Name the folder of a model, an export or a run.", fatal=True)
        ]
    sealed = (folder / checkpoint.MANIFEST_NAME).is_file()
    again = f"Export or download it again, or take a whole checkpoint of the run (qerl-trl merge {folder.name}/checkpoint-<step> ...)."
    found = []
    if sealed:
        wrong = checkpoint.problems(folder) or checkpoint.added(folder)
        found = [Problem(f"{folder}: {line}", again, fatal=True) for line in wrong]
    else:
        remedy = "What qerl-trl quantizes, merges or saves has one."
        found = [Problem(f"{folder} has no manifest: only headers and values were looked at.", remedy)]
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            headers.require_finite(file)
        except ValueError as error:
            found.append(Problem(str(error), again, fatal=True))
    size = sum(file.stat().st_size for file in files if file.is_file())
    return (
        f"{folder}: {len(files)} weight files, {size / 1e9:.2f} GB{', as they were sealed' if sealed and not found else ''}",
        found,
    )
