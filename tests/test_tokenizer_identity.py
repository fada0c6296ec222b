"""A tokenizer is known by all of its content, in every form in which it comes."""

import copy
import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    CTRLTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from qerl_trl.checkpoint.settings import recorded_tokenizer as recorded

TEXTS = ["the norm's weights: 12 + 34.5 = 46.5", "more words, and words again", "one Klingon beside nine others"] * 9
SPECIAL = ["<pad>", "<eos>", "<unk>"]


def bytes_of(merges: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(alphabet) + len(SPECIAL) + merges
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return tokenizer


def wrapped(merges: int = 40):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_of(merges), pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{{ messages[0].content }}"
    return tokenizer


def of_class(kind):
    model = json.loads(bytes_of(40).to_str())["model"]
    return kind(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])


def python_only(tmp_path, merges=("t h", "th e</w>")):
    """One without a file of the tokenizers library."""
    tokens = [*"the", *(f"{letter}</w>" for letter in "the"), "th", "the</w>", "<unk>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))


def with_padding_by_hand():
    """As scripts have it: a token that was in the vocabulary, and becomes an added one only when it is saved and loaded."""
    tokenizer = of_class(GPT2Tokenizer)
    tokenizer.pad_token = "<pad>"
    return tokenizer


def with_added():
    tokenizer = wrapped()
    tokenizer.add_tokens(["<think>", AddedToken("<answer>", lstrip=True)])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<tool>"]})
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [wrapped, with_added, with_padding_by_hand, *(lambda k=k: of_class(k) for k in (Qwen2Tokenizer, LlamaTokenizer, GPT2Tokenizer))],
    ids=["any", "added", "padding", "qwen2", "llama", "gpt2"],
)  # fmt: skip
def test_saved_and_loaded_it_is_the_same(make, tmp_path):
    tokenizer = make()
    found = recorded(tokenizer)
    if tokenizer.pad_token:
        tokenizer(["a", "a b"], padding="max_length", max_length=9, truncation=True)  # which its backend remembers
    assert recorded(tokenizer) == found
    for name in ("once", "again"):
        tokenizer.save_pretrained(tmp_path / name)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert recorded(tokenizer) == found


def test_one_without_a_file_of_its_own_is_the_same_too(tmp_path):
    tokenizer = python_only(tmp_path)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(tmp_path / "saved")
    assert recorded(CTRLTokenizer.from_pretrained(tmp_path / "saved")) == recorded(tokenizer)


def changed(tokenizer, how):
    tokenizer = copy.deepcopy(tokenizer)
    how(tokenizer)
    return recorded(tokenizer)["tokenizer_content_sha256"]


@pytest.mark.parametrize(
    "how",
    [
        lambda t: t.add_tokens(["<think>"]),
        lambda t: t.add_special_tokens({"extra_special_tokens": ["<think>"]}),
        lambda t: setattr(t, "chat_template", "{{ messages[-1].content }}"),
        lambda t: setattr(t, "bos_token", "<eos>"),
        lambda t: setattr(t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    ],
    ids=["added", "special", "template", "begin", "split"],
)
def test_what_is_changed_makes_another_one(how):
    tokenizer = wrapped()
    assert changed(tokenizer, how) != recorded(tokenizer)["tokenizer_content_sha256"]


def test_what_no_token_of_the_sample_shows_makes_another_one(tmp_path):
    """One merge more, of words that the sample does not have."""
    content = json.loads(bytes_of(40).to_str())
    content["model"]["vocab"]["Qz"] = len(content["model"]["vocab"])
    content["model"]["merges"].append(["Q", "z"])
    tokenizer = wrapped()
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), pad_token="<pad>", eos_token="<eos>"
    )
    other.chat_template = tokenizer.chat_template
    then, now = recorded(tokenizer), recorded(other)
    assert other.tokenize("Qzar") != tokenizer.tokenize("Qzar")
    assert then["tokenizer_content_sha256"] != now["tokenizer_content_sha256"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    two = python_only(tmp_path / "a"), python_only(tmp_path / "b", merges=["t h"])
    assert changed(two[0], lambda _: None) != changed(two[1], lambda _: None)
