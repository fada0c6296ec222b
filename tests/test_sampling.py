"""What is sampled from, whatever wraps the model, and where a completion ends."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from qerl_trl import QeRLGRPOTrainer, Script
from qerl_trl.rollout.sampling import end_tokens, of_the_model_alone, save_generation_config, settle_ends, stored
from tests.faults.tiny_runs import call

ASSETS = Path(__file__).resolve().parents[1] / "examples/assets"


@pytest.mark.parametrize(
    "children", [(), ("module",), ("_fsdp_wrapped_module",), ("_orig_mod", "_fsdp_wrapped_module")]
)
def test_the_models_own_file_is_left_out_inside_any_wrapper(children):
    """FSDP's first version leaves its wrapper in `trainer.model`, which has no generation_config of its own."""
    model = nn.Linear(2, 2)
    model.generation_config = own = GenerationConfig(min_p=0.5, eos_token_id=3)
    wrapped = model
    for child in children:
        outer = nn.Module()
        outer.add_module(child, wrapped)
        wrapped = outer
    with of_the_model_alone(wrapped):
        assert (model.generation_config.min_p, model.generation_config.eos_token_id) == (None, 3)
    assert model.generation_config is own and own.min_p == 0.5


def test_what_is_no_module_is_left_alone():
    """As TRL's own tests build trainers."""
    with of_the_model_alone(SimpleNamespace(training=True)):
        pass


# --- where a completion ends ------------------------------------------------------------------------------------------------------

ABSENT = object()
START, END, TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"  # 1, 2 and 0 of the embedded tokenizers
CHATML = None  # their own template
PLAIN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
SPACED = "{% for m in messages %}[{{ m['content'] }}] {{ m['content'] }} <|im_end|>\n<|endoftext|>{% endfor %}"
THINKING = "{% for m in messages %}{{ m['content'] + ('<|im_end|>' if thinking else '<|endoftext|>') }}{% endfor %}"
STRICT = "{{ raise_exception('only tools') }}"
KINDS = {
    # tokenizer's eos, generation_config.json's, config.json's, chat template, expected
    "all say the same": (END, 2, 2, CHATML, {2}),
    "Qwen, instruct": (END, [2, 0], 2, CHATML, {0, 2}),
    "Qwen, base": (TEXT, 0, 0, CHATML, {0, 2}),
    "the tokenizer's is another": (END, 500, 500, CHATML, {2, 500}),
    "no generation_config.json": (END, ABSENT, [500, 0], CHATML, {0, 2, 500}),
    "none in generation_config.json": (END, None, 500, CHATML, {2, 500}),
    "config.json alone is older": (END, [2, 0], 500, CHATML, {0, 2}),
    "none at all but the template's": (None, None, None, CHATML, {2}),
    "the template's is another than both": (START, 500, 500, CHATML, {1, 2, 500}),
    "the template ends with text": (TEXT, 0, 0, PLAIN, {0}),
    "the template writes a blank before it": (TEXT, 500, 500, SPACED, {0, 2, 500}),
    "the template asks how": (TEXT, 0, 0, THINKING, {0, 2}),
    "the template takes no such messages": (TEXT, 0, 0, STRICT, {0}),
    "no template": (TEXT, 0, 0, "", {0}),
    "an id that the model has not": (END, [2, 9999], 2, CHATML, {2}),
}


@pytest.fixture
def base(tmp_path):
    """`base(tokenizer's eos, generation_config.json's, config.json's, template)`: folder of a model."""

    def make(own, generation, config, template, source="tiny-qwen2"):
        folder = Path(shutil.copytree(ASSETS / source, tmp_path / "base"))
        for name, value in (("generation_config.json", generation), ("config.json", config)):
            content = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(content | {"eos_token_id": None if value is ABSENT else value}))
        if generation is ABSENT:
            (folder / "generation_config.json").unlink()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.eos_token = own
        tokenizer.chat_template = tokenizer.chat_template if template is CHATML else template or None
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def listed(folder):
    ids = json.loads((Path(folder) / "generation_config.json").read_text()).get("eos_token_id")
    return {ids} if isinstance(ids, int) else set(ids or ())


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizers_the_models_and_the_templates_end_together(base, tmp_path, kind):
    *given, expected = KINDS[kind]
    folder = base(*given)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), stored(folder, AutoConfig.from_pretrained(folder))
    options = {"thinking": True} if kind == "the template asks how" else {}
    ends = end_tokens(model, tokenizer, **options)
    assert set(ends) == expected and len(ends) == len(expected)
    model.generation_config.eos_token_id = ends
    save_generation_config(tmp_path, model, tokenizer)
    assert listed(tmp_path) == expected


def test_an_end_that_only_the_template_has_is_said(base, monkeypatch):
    said = []
    monkeypatch.setattr("qerl_trl.rollout.sampling.logger.info", lambda text, *args: said.append(text % args))
    for kind in ("Qwen, base", "Qwen, instruct"):
        folder = base(*KINDS[kind][:-1])
        model = stored(folder, AutoConfig.from_pretrained(folder))
        end_tokens(model, AutoTokenizer.from_pretrained(folder))
        shutil.rmtree(folder)
    (line,) = said
    assert END in line and "Completions end at the chat template's" in line


@pytest.mark.parametrize("use_vllm", [False, True])
def test_what_generation_kwargs_add_ends_completions_too(use_vllm):
    """TRL compares with `eos_token_ids`: a completion that ended elsewhere counted as truncated."""
    model = nn.Module()
    model.generation_config = GenerationConfig(eos_token_id=3)
    model.config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(vocab_size=9))
    given = {"stop_token_ids": [7]} if use_vllm else {"eos_token_id": 7}
    trainer = SimpleNamespace(
        model=model,
        args=SimpleNamespace(generation_kwargs=given, chat_template_kwargs=None, use_vllm=use_vllm),
        processing_class=SimpleNamespace(eos_token_id=2, chat_template=None),
        generation_config=GenerationConfig(eos_token_id=[7]),
        generation_kwargs=dict(given),
    )
    settle_ends(trainer)
    assert trainer.eos_token_ids == model.generation_config.eos_token_id == [2, 3, 7]
    if not use_vllm:
        assert trainer.generation_config.eos_token_id == trainer.generation_kwargs["eos_token_id"] == [2, 3, 7]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps on a base that ends elsewhere than its tokenizer and its template, and its results."""
    folder = tmp_path_factory.mktemp("ends")
    base = Path(shutil.copytree(ASSETS / "tiny-tasks", folder / "base"))
    for name in ("config.json", "generation_config.json"):
        (base / name).write_text(json.dumps(json.loads((base / name).read_text()) | {"eos_token_id": 500}))
    words = (
        f"--config letters --model_name_or_path {base} --output_dir {folder / 'run'} --max_steps 2 --eval_problems 60"
    )
    words += " --per_device_train_batch_size 32 --save_strategy no --learning_rate 1e-3"
    script = Script.parse(argv=words.split())
    script.train(QeRLGRPOTrainer(**script.trainer_arguments()))
    return folder, json.loads((folder / "run/results.json").read_text())


def measured(model, *options):
    code, out, err = call("eval", model, "--task", "letters", "--limit", 60, "--json", *options)
    assert code == 0, err
    return json.loads(out)["accuracy"]


def test_eval_measures_what_the_run_measured(finished, tmp_path):
    """A run that reached 68 % was measured at 0.5 %, and one that learned nothing reported +19.5 points."""
    folder, results = finished
    before, after = results["before"]["accuracy"], results["after"]["accuracy"]
    assert before > 0 and after > 0 and listed(folder / "run") == {2, 500}
    asked = "--max-new-tokens", 16, "--output"
    assert measured(folder / "run", *asked, tmp_path / "b") == after


@pytest.mark.parametrize("form", ["bf16", "nvfp4", "base", "adapter"])
def test_what_a_run_leaves_ends_where_the_run_did(finished, tmp_path, form):
    folder, _ = finished
    code, _, err = call("merge", folder / "run", tmp_path / form, "--as", form, *["--force"] * (form == "nvfp4"))
    assert code == 0, err
    assert listed(tmp_path / form) == {2, 500}
    card = (tmp_path / form / "README.md").read_text()
    assert ("eos_token_id = [2, 500]" in card) == (form == "adapter"), "the other forms' own file has them"


def test_what_is_quantized_ends_there_too(finished, tmp_path):
    folder, _ = finished
    assert call("quantize", folder / "base", tmp_path / "made")[0] == 0
    assert listed(tmp_path / "made") == {2, 500}
