"""Hooks of MkDocs: navigation of _toctree.yml, API of `[[autodoc]]` lines, the page of options, and llms.txt."""

import re
import sys
from pathlib import Path

import yaml
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
sys.path.insert(0, str(SOURCE))

from qerl_trl import _EXPORTS  # noqa: E402
from qerl_trl.support.recipes import documented_options  # noqa: E402

GITHUB = "https://github.com/qerl-trl/qerl-trl"


def on_config(config):
    chapters = yaml.safe_load((ROOT / "docs/source/_toctree.yml").read_text())
    nav = [{c["title"]: [{s["title"]: f"{s['local']}.md"} for s in c["sections"]]} for c in chapters]
    nav[-1]["Reference"].insert(1, {"Options": "options.md"})
    config.nav = nav
    return config


def on_files(files, config):
    files.append(File.generated(config, "options.md", content=options()))
    return files


def options() -> str:
    """The options of QeRLConfig by group."""
    lines = ["# Options", "", "Fields of `QeRLConfig` beyond those of TRL's [`GRPOConfig`]"]
    lines[-1] += "(https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig), in YAML and on the command line.\n"
    for group, rows in documented_options().items():
        lines += [f"## {group}", "", "| option | type and default | |", "|---|---|---|"]
        lines += [f"| `{name}` | {kind} | {what} |".replace(" | None", " or None") for name, kind, what in rows]
        lines.append("")
    return "\n".join(lines)


def source_of(name: str) -> tuple[str, str]:
    """The defining module's name of a definition, and its address on GitHub."""
    module, _, name = name.rpartition(".")
    module = f"qerl_trl.{_EXPORTS[name]}" if module == "qerl_trl" else module
    file = SOURCE / f"{module.replace('.', '/')}.py"
    line = next((i for i, text in enumerate(file.read_text().splitlines(), 1) if f" {name}(" in text), 1)
    return f"{module}.{name}", f"{GITHUB}/blob/main/{file.relative_to(ROOT)}#L{line}"


def on_page_markdown(markdown, page, config, files):
    def documented(match):
        place, address = source_of(match[1])
        members = re.findall(r"- (\w+)", match[2])
        shown = f"::: {place}\n    options:\n      members: {members or 'false'}\n"
        shown += f"      inherited_members: {members}\n" if members else ""
        return f"{shown}\n[source]({address})\n"

    markdown = re.sub(r"\[\[autodoc\]\] (\S+)\n((?: +- \w+\n)*)", documented, markdown + "\n")
    return re.sub(r"\]\(\.\./\.\./([^)#\s]*)", rf"]({GITHUB}/blob/main/\1", markdown)


def on_page_content(html, page, config, files):
    return re.sub(r"\[(<code>[\w.]+</code>)\]", r"\1", html)  # Hugging Face's links in docstrings


def on_post_build(config):
    site, lines, whole = Path(config.site_dir), [f"# {config.site_name}", "", f"> {config.site_description}", ""], []
    for chapter in config.nav:
        for title, pages in chapter.items():
            lines += [f"## {title}", ""]
            for page in pages:
                for name, file in page.items():
                    lines.append(f"- [{name}]({config.site_url}{file.removesuffix('.md')}/)")
                    if (path := Path(config.docs_dir) / file).is_file():
                        whole.append(path.read_text())
            lines.append("")
    (site / "llms.txt").write_text("\n".join(lines))
    (site / "llms-full.txt").write_text("\n\n".join(whole))
