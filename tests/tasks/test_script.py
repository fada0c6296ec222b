"""Arguments of a training script: recipe, task file, command line, and the defaults without a recipe."""

import dataclasses

import pytest
from trl import ModelConfig, get_peft_config

from qerl_trl import QeRLConfig
from qerl_trl.support import recipes
from qerl_trl.support.recipes import parser_of
from qerl_trl.tasks import script as script_module
from qerl_trl.tasks.script import Script
from qerl_trl.tasks.task import PARSED, Task

OWN = Task(name="mine", dataset_name="user/mine")


@pytest.fixture
def parse(folder):
    """`parse(*words)`: a script with a small recipe and these words."""

    def run(*words, recipe="max_steps: 3\n", task=None):
        (folder / "recipe.yaml").write_text(f"use_cpu: true\nbf16: false\noutput_dir: {folder}/run\n{recipe}")
        return Script.parse(task, argv=["--config", str(folder / "recipe.yaml"), *words])

    return run


def test_the_command_line_replaces_the_recipe_and_the_file(folder, read, parse):
    read(dataset_name="own.py:rows", grader="exact", system_prompt="A")
    recipe, words = "dataset_name: user/other\nsystem_prompt: of the recipe\n", ("--task", f"{folder}/my_words.yaml")
    task = parse(*words, "--grader", "numeric", recipe=recipe).task
    assert (task.dataset_name, task.grader, task.system_prompt) == ("own.py:rows", "numeric", "A")
    task = parse(recipe=f"task: {folder}/my_words.yaml\ngrader: math\n").task
    assert (task.dataset_name, task.grader) == ("own.py:rows", "math")
    for given in (("--dataset_name", "user/other"), ("--dataset-name", "user/other"), ("--dataset-name=user/other",)):
        assert parse(*words, *given).task.dataset_name == "user/other"
        assert parse(*given, task=OWN).task.dataset_name == "user/other"


def test_arguments_of_a_function_with_data(parse):
    words = ("--dataset_name", "examples/letters.py:words", "--dataset_kwargs", '{"train": 2, "test": 3}')
    test = parse(*words, "--prompt_suffix", "Now.").task.splits()[1]
    assert len(test) == 3 and test[0]["prompt"][0]["content"].endswith(" Now.")


def test_the_task_of_a_script_comes_before_the_recipes(folder, parse, caplog):
    """With a shipped recipe, its data and rewards were trained, without a word."""
    own = dataclasses.replace(OWN, reward_funcs=["correctness_reward"], grader="exact")
    script = Script.parse(own, config="letters", argv=["--output_dir", str(folder / "run")])
    assert script.task.dataset_name == "user/mine" and script.task.reward_funcs == ["correctness_reward"]
    assert "are ignored" not in caplog.text
    assert parse(recipe="task: letters\ndataset_name: user/other\n", task=own).task.dataset_name == "user/mine"
    assert "of the recipe are ignored: task: letters, dataset_name: user/other" in caplog.text
    assert parse("--task", "letters", task=own).task.dataset_name != "user/mine"


def test_a_script_without_any_argument(folder, parse):
    """As docs/source/your_task.md has it in Python."""
    parse()
    script = Script.parse(OWN, argv=[], config=str(folder / "recipe.yaml"))
    assert script.task.dataset_name == "user/mine" and script.args.max_steps == 3
    with pytest.raises(ValueError, match="--task  is no file"):  # an unset shell variable; was a KeyError
        Script.parse(OWN, argv=["--task="], config=str(folder / "recipe.yaml"))


def test_a_recipes_task_is_looked_up_next_to_it(read, parse, monkeypatch, tmp_path):
    read(dataset_name="own.py:rows", grader="exact")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert parse(recipe="task: my_words.yaml\n").task.dataset_name == "own.py:rows"
    for named in ("words.yaml", "5"):  # a number was a TypeError of os.path
        with pytest.raises(ValueError, match=rf"\.yaml: task: {named} is no file here or beside .*recipe\.yaml"):
            parse(recipe=f"task: {named}\n")
    (elsewhere / "my_words.yaml").write_text("dataset_name: other.jsonl\n")
    assert parse(recipe="task: my_words.yaml\n").task.dataset_name == "own.py:rows"


def test_data_and_rewards_of_a_recipe(parse):
    task = parse(recipe="dataset_name: own.py:rows\nreward_funcs: [own.py:shouted]\n").task
    assert (task.dataset_name, task.reward_funcs) == ("own.py:rows", ["own.py:shouted"])
    task = parse("--dataset_name", "user/other", recipe="task: gsm8k\n").task
    assert (task.dataset_name, task.dataset_config) == ("user/other", None)  # not of the first data
    assert parse(recipe="task: gsm8k\n").task.dataset_config == parse().task.dataset_config == "main"


@pytest.mark.parametrize("words", [[], ["--use_cpu=true", "--max_completion_length", "32"]])
def test_a_model_without_a_recipe_gets_no_value_of_the_embedded_one(words, capsys, monkeypatch, tmp_path):
    """Its learning rate, lengths, data and adapter are for the tiny model alone."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    script = Script.parse(argv=["--model_name_or_path", str(tmp_path), "--output_dir", str(tmp_path / "run"), *words])
    given = ["--output_dir", str(tmp_path / "run"), "--use_cpu", "true", "--bf16", "false", *words]
    args, model_args = parser_of([QeRLConfig, ModelConfig]).parse_args_into_dataclasses(args=given)
    embedded = recipes.contents(recipes.config_file("embedded"))
    for name in embedded.keys() - {"task", "model_name_or_path", "report_to", "eval_batch_size", "dtype"}:
        kind, got = (args, script.args) if hasattr(args, name) else (model_args, script.model_args)
        assert getattr(got, name) == getattr(kind, name), name
    assert script.task.dataset_name == "openai/gsm8k" and script.model_args.dtype == "bfloat16"
    (line,) = capsys.readouterr().out.splitlines()
    assert "No recipe" in line and f"learning rate {args.learning_rate:g}," in line
    assert f"at most {args.max_completion_length} tokens" in line and "--config" in line


def test_an_unknown_option_is_refused_with_similar_ones(parse):
    with pytest.raises(ValueError, match=r"--max_stepps: unknown option .* Did you mean --max_steps"):
        parse("--max_stepps", "3", recipe="learning_rate: 1.0e-5\n")
    with pytest.raises(ValueError, match=r"--reward_func --zebra=1: unknown option .* Did you mean --reward_funcs"):
        parse("--zebra=1", recipe="reward_func: [own.py:shouted]\n")
    taken = {field.name for kind in (QeRLConfig, ModelConfig) for field in dataclasses.fields(kind)}
    assert not taken & {*PARSED, "task", "eval_problems"}  # no option has two homes


@pytest.mark.parametrize("base_format", ["nvfp4", "full"])
def test_an_adapter_next_to_a_full_fine_tuning_gives_a_warning(parse, caplog, base_format):
    words = ("--base_format", base_format, "--use_peft", "true", "--lora_r", "4")
    recipe = "task: arithmetic\nmodel_name_or_path: examples/assets/tiny-qwen2\n"
    adapter = parse(*words, recipe=recipe).trainer_arguments()["peft_config"]
    assert (adapter is None) == ("use_peft and lora_* of the recipe" in caplog.text) == (base_format == "full")


def test_trackio_where_it_is_installed_and_nobody_says_otherwise(parse, monkeypatch):
    monkeypatch.setattr(script_module.importlib.util, "find_spec", lambda name: name == "trackio" or None)
    args = parse().args
    assert (args.report_to, args.trackio_space_id, args.trackio_static_space_id) == (["trackio"], None, False)
    assert (args.log_completions, args.num_completions_to_print) == (True, 0)  # only in trackio
    assert parse("--log_completions", "false").args.log_completions is False
    assert parse("--report_to", "none").args.report_to == []
    assert parse(recipe="report_to: none\n").args.report_to == []


@pytest.mark.parametrize(
    ("words", "recipe", "dtype", "adapter"),
    [
        ((), "", "bfloat16", None),  # the trainer's own
        (("--lora-r", "4"), "lora_target_modules: [q_proj]\n", "bfloat16", (4, 8, 0.0)),
        (("--dtype=float32",), "use_peft: true\nlora_r: 4\n", "float32", (4, 32, 0.05)),  # TRL's
        ((), "base_format: full\n", "float32", None),
    ],
)
def test_defaults_of_the_model_are_those_of_the_trainer(parse, words, recipe, dtype, adapter):
    """TRL's ModelConfig says float32, and ignores lora_* without use_peft."""
    model_args = parse(*words, recipe=recipe).model_args
    config = get_peft_config(model_args)
    found = config and (config.r, config.lora_alpha, config.lora_dropout)
    assert (model_args.dtype, found) == (dtype, adapter)
