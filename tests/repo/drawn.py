"""Forty messages and forty docstrings of the package, drawn by seed for readers without the code.

python -m tests.repo.drawn [SEED]
"""

import ast
import random
import sys

from tests.repo.test_fences import MODULES, messages


def main() -> None:
    said, docstrings = [], []
    for file in sorted(MODULES.values()):
        tree = ast.parse(file.read_text())
        said += [text for _, text in messages(tree, "<value>") if len(text) > 30]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                docstrings.append(f"{node.name}: {text}")
    draw = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 48)
    for name, texts in (("MESSAGES", said), ("DOCSTRINGS", docstrings)):
        print(f"== {name} ({len(texts)} in all)")
        for number, text in enumerate(draw.sample(texts, 40), 1):
            print(f"{number}. {text}\n")


if __name__ == "__main__":
    main()
