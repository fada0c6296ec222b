"""Pictures can come where a processor meets data, or a world, that may hold some; an engine of text alone is built without a tower."""

from types import SimpleNamespace

import pytest
from datasets import Dataset, Features, Image, List, Value

from qerl_trl.rollout import spec
from tests.tiny_models import make_tiny_tokenizer

PROCESSOR = SimpleNamespace(image_processor=None)
TEXT = Dataset.from_dict({"prompt": ["What is 2 + 2?"], "answer": ["4"]})
MESSAGES = Dataset.from_dict({"prompt": [[{"role": "user", "content": "What is 2 + 2?"}]]})
PARTS = Dataset.from_dict({"prompt": [[{"role": "user", "content": [{"type": "image", "text": None}]}]]})
SEEN = Dataset.from_dict(
    {"prompt": ["What is it?"], "image": [None]}, Features({"prompt": Value("string"), "image": Image()})
)
LISTED = Dataset.from_dict(
    {"prompt": ["What is it?"], "images": [[]]}, Features({"prompt": Value("string"), "images": List(Image())})
)


def trainer(train=TEXT, held_out=None, **further):
    return SimpleNamespace(train_dataset=train, eval_dataset=held_out, **further)


CASES = {
    "text": (trainer(), False),
    "messages": (trainer(MESSAGES, TEXT), False),
    "nothing played": (trainer(tools=[], environments=None, rollout_func=None), False),
    "parts of messages": (trainer(PARTS), True),
    "a column": (trainer(SEEN), True),
    "a column of lists": (trainer(LISTED), True),
    "held-out": (trainer(TEXT, SEEN), True),
    "one of the held-out": (trainer(TEXT, {"text": MESSAGES, "seen": LISTED}), True),
    "streamed": (trainer(TEXT.to_iterable_dataset()), True),
    "made when read": (trainer(TEXT.with_transform(lambda rows: rows)), True),
    "no prompts": (trainer(TEXT.remove_columns("prompt")), True),
    "tools": (trainer(tools=[print]), True),
    "environments": (trainer(environments=[object()]), True),
    "a rollout function": (trainer(rollout_func=print), True),
}


@pytest.mark.parametrize(("of", "expected"), CASES.values(), ids=CASES)
def test_where_pictures_may_come(of, expected):
    assert spec.pictures_may_come(of, PROCESSOR) is expected
    assert spec.pictures_may_come(of, make_tiny_tokenizer()) is False
