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


CASES = {
    "text": ([TEXT], False),
    "messages": ([MESSAGES, TEXT], False),
    "nothing held out": ([TEXT, None], False),
    "parts of messages": ([PARTS], True),
    "a column": ([SEEN], True),
    "a column of lists": ([LISTED], True),
    "held-out": ([TEXT, SEEN], True),
    "streamed": ([TEXT.to_iterable_dataset()], True),
    "made when read": ([TEXT.with_transform(lambda rows: rows)], True),
    "no prompts": ([TEXT.remove_columns("prompt")], True),
}


@pytest.mark.parametrize(("of", "expected"), CASES.values(), ids=CASES)
def test_where_pictures_may_come(of, expected):
    assert spec.pictures_may_come(PROCESSOR, of, False) is expected
    assert spec.pictures_may_come(PROCESSOR, of, True) is True
    assert spec.pictures_may_come(make_tiny_tokenizer(), of, True) is False
