"""The names and settings that users write. A removal is a change of public_surface.json and a line of CHANGELOG.md."""

import dataclasses
import json
from pathlib import Path

import typer
from trl import GRPOConfig

import qerl_trl
from qerl_trl.cli.main import app
from qerl_trl.support.recipes import documented_options

FROZEN = json.loads(Path(__file__).with_name("public_surface.json").read_text())


def test_options_of_the_commands():
    commands = typer.main.get_command(app).commands.items()
    assert {name: sorted(o for p in one.params for o in p.opts) for name, one in commands} == FROZEN["commands"]


def test_names():
    assert sorted(qerl_trl.__all__) == FROZEN["names"]


def test_fields_of_the_configuration():
    stock = {field.name for field in dataclasses.fields(GRPOConfig)}
    own = {f.name: repr(f.default) for f in dataclasses.fields(qerl_trl.QeRLConfig) if f.name not in stock}
    described = {name for rows in documented_options().values() for name, *_ in rows}
    assert own == FROZEN["fields"] and own.keys() <= described
