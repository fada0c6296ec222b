"""What a model's folder has beside its weights and configuration: the tokenizer."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

_PROBE = "Tom has 12 apples and gives 7 away.\n#### 5 <|im_start|>user\n\\frac{1}{2} = 0.5"


def save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if tokenizer is None:
        return
    tokenizer.save_pretrained(folder)
    # AutoTokenizer chooses a class by the model's type and can silently read custom tokenizers wrong
    own = "auto_map" in tokenizer.init_kwargs  # code of its own, which stays where it is
    again = (type(tokenizer) if own else AutoTokenizer).from_pretrained(folder)
    if again(_PROBE)["input_ids"] != tokenizer(_PROBE)["input_ids"]:
        raise RuntimeError(
            f"The saved tokenizer reads back as {type(again).__name__} and encodes differently from the {type(tokenizer).__name__} in use: "
            "models published with it would see other tokens. Set tokenizer_class in tokenizer_config.json so that AutoTokenizer agrees."
        )
