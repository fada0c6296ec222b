"""The order of the wings of the package (`src/qerl_trl/`), and sizes of files and classes."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "qerl_trl"
MODULES = {
    "qerl_trl"
    + "".join(f".{part}" for part in file.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


def imports(module: str) -> set[str]:
    """Absolute names of the modules that `module` imports, also inside functions, but not under TYPE_CHECKING."""
    file, found = MODULES[module], set()
    package = (module if file.name == "__init__.py" else module.rpartition(".")[0]).split(".")

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                parents = package[: len(package) - child.level + 1] if child.level else []
                base = ".".join([*parents, *([child.module] if child.module else [])])
                found.update(f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in child.names)
            visit(child)

    visit(ast.parse(file.read_text()))
    return found


GRAPH = {module: imports(module) & set(MODULES) for module in MODULES}


#: a wing imports only wings below it
ORDER = "cli trainer tasks run checks publish rollout memory update config model checkpoint noise nvfp4 support".split()


def wing(module: str) -> str:
    return module.split(".")[1]


def within(module: str, wing: str) -> bool:
    return module == f"qerl_trl.{wing}" or module.startswith(f"qerl_trl.{wing}.")


def test_a_wing_imports_only_wings_below_it():
    for module in GRAPH:
        for other in GRAPH[module] - {"qerl_trl"}:
            if module != "qerl_trl" and wing(module) != wing(other):
                assert ORDER.index(wing(module)) < ORDER.index(wing(other)), f"{module} imports {other}"


def test_the_drawing_has_every_wing_in_order():
    drawn = re.findall(r"^    (\w+)\[", (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text(), re.M)
    assert drawn == ORDER


def test_no_cycle():
    """Imports inside functions count."""
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in GRAPH[module] - {"qerl_trl"}:
                walk(other, (*path, module))
            done.add(module)

    for module in GRAPH:
        walk(module, ())


def test_the_engine_takes_little_of_the_trainers_side():
    for module in GRAPH:
        if within(module, "rollout.vllm"):
            taken = {o for o in GRAPH[module] if within(o, "rollout") and not within(o, "rollout.vllm")}
            assert taken <= {f"qerl_trl.rollout.{name}" for name in ("spec", "engine", "weights")}, module


def test_only_rollout_vllm_imports_vllm():
    for module in MODULES:
        if not within(module, "rollout.vllm"):
            assert not {name for name in imports(module) if name.split(".")[0] == "vllm"}, module


NOT_WITH_THE_TRAINER = """
    qerl_trl.publish.export qerl_trl.publish.hub qerl_trl.publish.card qerl_trl.tasks qerl_trl.cli
    math_verify sklearn wandb
""".split()


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import qerl_trl", ("vllm", "triton", "torch", "transformers")),
        ("import qerl_trl.trainer", NOT_WITH_THE_TRAINER),
        ("import qerl_trl.cli.main", ("torch", "transformers", "bitsandbytes")),
        # PEFT imports an installed bitsandbytes, and some versions of that fetch a kernel from the Hub
        ("import qerl_trl.publish.quantize, qerl_trl.publish.card", ("peft", "bitsandbytes")),
        ("import qerl_trl.cli.doctor", ("peft", "bitsandbytes")),
    ],
)
def test_an_import_is_light(statement, absent):
    code = f"{statement}; import sys; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_file_is_one_noun():
    """A longer one usually has a second noun."""
    longer = [file.name for file in MODULES.values() if len(file.read_text().splitlines()) > 450]
    assert len(longer) <= 3, longer


def test_the_trainer_is_a_delta():
    """Its lines include its mixins."""
    nodes = [node for file in MODULES.values() for node in ast.parse(file.read_text()).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    todo, lines = ["QeRLGRPOTrainer", "QeRLRLOOTrainer"], {}
    while todo:
        name = todo.pop()
        if name in classes:
            lines[name] = classes[name].end_lineno - classes[name].lineno + 1
            todo += [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id not in lines]
    assert {"QeRLMixin", "SavingMixin", "PublishingMixin"} <= set(lines) and sum(lines.values()) <= 500, lines


# --- language ---------------------------------------------------------------------------------------------------------

#: this project's old dialect
DIALECT = re.compile(r"\b(anew|as it is|goes on|says so|is told|beside|whose|of which)\b", re.IGNORECASE)
LOGS = {"warn", "warning", "warning_once", "info", "error"}


def constant_part(node: ast.AST, value: str = "") -> str:
    """The text of a string, with `value` for the values in an f-string."""
    if isinstance(node, ast.BinOp):
        return constant_part(node.left, value) + constant_part(node.right, value)
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else value for part in parts)


def messages(tree: ast.AST, value: str = "") -> list[tuple[int, str]]:
    """(line, text) of every exception, warning and log."""
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGS:
            calls.append(node)
    return [(argument.lineno, constant_part(argument, value)) for call in calls for argument in call.args]


def prose(file: Path) -> list[tuple[int, str]]:
    """(line, text) of every docstring, comment and message."""
    tree = ast.parse(text := file.read_text())
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            found += enumerate(ast.get_docstring(node, clean=False).splitlines(), node.body[0].lineno)
    return found + messages(tree)


def test_messages_are_short():
    found = [(file, at, len(text)) for file in MODULES.values() for at, text in messages(ast.parse(file.read_text()))]
    long = [f"{file}:{at}: {count} characters, at most 200" for file, at, count in found if count > 200]
    assert not long, "\n".join(long)


def test_words_are_plain():
    found = [(file, at, DIALECT.search(text)) for file in MODULES.values() for at, text in prose(file)]
    old = [f"{file}:{at}: {match[0]}" for file, at, match in found if match]
    assert not old, "\n".join(old)
