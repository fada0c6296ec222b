"""Keep secrets out of written and uploaded files.

A secret is a value under a telling name (an argument such as `hub_token`, an environment variable such as
`WANDB_API_KEY`), the Hub token of this machine, or text in the form of a secret (`hf_...`, `user:password@` in a URL,
a private key). Written files are masked ([`redact`], [`cleaned`]), uploads are searched ([`find`], [`find_in`]), and
secrets in other arguments are refused ([`check_places`]). Messages name the secret and never show its value.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

MASK = "<secret>"
#: names of arguments, options and keys with a secret value; not `eos_token` and similar ones
_ARGUMENT = (
    r"(?:(?:hub|hf|auth|use_auth|access|api|bearer|refresh|github|gitlab|wandb|server|session)_)?token"
    r"|(?:\w+_)?(?:api_?key|access_key|secret_key|private_key|password|passwd|secret|credentials?)"
    r"|(?:\w+_)?authorization"
)
_ARGUMENT_NAME = re.compile(_ARGUMENT, re.IGNORECASE)
_VARIABLE_NAME = re.compile(
    r"(?:^|_)(?:\w*TOKEN|\w*KEY|\w*PASS(?:WORD|WD)?|CREDENTIALS?)(?:_\d+)?$|SECRET", re.IGNORECASE
)
#: environment variables with such names that are no secrets
_HARMLESS_VARIABLE = re.compile(
    r"(?:\w+_)?(?:(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK)_TOKEN|(?:CACHE|SORT|PRIMARY|PUBLIC)_?KEY)"
)
#: least length of a secret (given, in the environment): shorter values would mask ordinary words
_MIN_GIVEN, _MIN_VARIABLE = 8, 12
#: kind -> substrings for a quick test, pattern, replacement
_FORMS = {
    "a Hugging Face token": (["hf_", "api_org_"], re.compile(r"(?:hf_|api_org_)[A-Za-z0-9]{20,}"), MASK),
    "a GitHub token": (
        ["ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"],
        re.compile(r"(?:gh[pousr]|github_pat)_\w{30,}"),
        MASK,
    ),
    "an API key": (["sk-"], re.compile(r"\bsk-(?:proj|ant|svcacct|admin|or)-[\w-]{32,}|\bsk-[A-Za-z0-9_]{32,}"), MASK),
    "an AWS key": (["AKIA"], re.compile(r"AKIA[0-9A-Z]{16}"), MASK),
    "a private key": (
        ["PRIVATE KEY-----"],
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\w+/=\s\\:,.-]*?-----END [A-Z ]*PRIVATE KEY-----)?"),
        MASK,
    ),
    # a name alone is no secret, unless it is as long as a token
    "a password in a URL": (
        ["://"],
        re.compile(r"""://(?:[^/\s:@"'<>\\]*:[^/\s@"'<>\\]+|[^/\s:@"'<>\\]{20,})@"""),
        f"://{MASK}@",
    ),
}
_NAMED = _ARGUMENT.replace("_", "[_-]")
#: `--hub_token X` in a command line
_OPTION = re.compile(rf"""(--(?:{_NAMED})(?:\s+|=)["']?)[^\s"'<>\\-][^\s"'<>\\]*""", re.IGNORECASE)
#: `{"token": "X"}`, `hub_token='X'` in a command line or a configuration
_ASSIGNED = re.compile(r"""(?<![\w-])([\w-]++)((?:\\*["'])?\s*[:=]\s*\\*["'])([^"'\\<]{8,})""")
#: weights have text only in their headers
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".distcp")
_HEADER_BYTES = 1 << 20
#: deepest nesting of arguments to search
_DEPTH = 8
_given: dict[str, str] = {}


def remember(name: str, value: object) -> None:
    """Mask `value`, given as the argument `name` for a secret, everywhere in this process from now on."""
    if isinstance(value, str) and len(value := value.strip()) >= _MIN_GIVEN:
        _given[value] = name


def known() -> dict[str, str]:
    """Return the secrets of this process and machine -> descriptions, the longest secret first."""
    from huggingface_hub import get_token

    found = {}
    for name, text in os.environ.items():
        if _VARIABLE_NAME.search(name) and not _HARMLESS_VARIABLE.fullmatch(name):
            value = text.strip()
            if len(value) >= _MIN_VARIABLE and not os.path.exists(value):
                found[value] = f"the value of {name}"
    for value, name in _given.items():
        found[value] = f"the value of {name}"
    if token := get_token():
        found[token] = "the Hub token"
    return {value: found[value] for value in sorted(found, key=len, reverse=True)}


def redact(text: str) -> str:
    """Return `text` with every secret masked, also the value after `--hub_token` and similar options."""
    for secret in known():
        text = text.replace(secret, MASK)
    for signs, form, masked in _FORMS.values():
        if any(sign in text for sign in signs):
            text = form.sub(masked, text)
    return _ASSIGNED.sub(_without_value, _OPTION.sub(rf"\1{MASK}", text))


def _without_value(assigned: re.Match) -> str:
    name, between, value = assigned.groups()
    return f"{name}{between}{MASK}" if _names_secret(name, value) else assigned[0]


def redacted_words(words: Sequence[str]) -> list[str]:
    """Apply [`redact`] to the words of a command line, also if `--hub_token` and its value are two words."""
    found: list[str] = []
    for word in words:
        follows = bool(found) and _OPTION.search(f"{found[-1]} x") is not None and "=" not in found[-1]
        found.append(MASK if follows else redact(word))
    return found


def cleaned(value: Any, mask: str | None = MASK) -> Any:
    """Copy dictionaries, lists and tuples with secrets masked, and `mask` for values under a secret's name."""
    if isinstance(value, str):
        return redact(value) if type(value) is str else value
    if isinstance(value, dict):
        return {key: mask if _names_secret(key, each) else cleaned(each, mask) for key, each in value.items()}
    return type(value)(cleaned(each, mask) for each in value) if type(value) in (list, tuple) else value


def find(text: str | bytes, is_json: bool = False) -> str | None:
    """Return what kind of secret `text` contains, or `None`. `is_json`: also look at the names of keys."""
    return _found(text, known()) or (_named_in_json(text) if is_json else None)


def _found(text: str | bytes, secrets: Mapping[str, str]) -> str | None:
    for secret, name in secrets.items():
        if (secret.encode() if isinstance(text, bytes) else secret) in text:  # type: ignore[operator]
            return name
    if isinstance(text, bytes):
        text = text.decode("latin-1")  # never fails; patterns are ASCII
    for name, (signs, form, _) in _FORMS.items():
        if any(sign in text for sign in signs) and form.search(text):
            return name
    return None


def _named_in_json(text: str | bytes) -> str | None:
    """Find a key that names a secret, by parsing: a vocabulary may contain `token":`."""
    named: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        named.extend(f"a secret, by the name of {key!r}" for key, value in pairs if _is_secret(key, value))

    try:
        json.loads(text, object_pairs_hook=look)
    except (ValueError, RecursionError):
        return None
    return named[0] if named else None


def find_in(path: Path) -> str | None:
    """Apply [`find`] to a file; of weights, to the first MiB."""
    with open(path, "rb") as file:
        return find(file.read(_HEADER_BYTES if path.suffix in _WEIGHTS else -1), path.suffix == ".json")


def check_places(arguments: Mapping[str, Any]) -> None:
    """Remember the secrets among `arguments`, and refuse any in an argument that is written to files or logs.

    Raises:
        `ValueError`: such an argument contains a secret; the message names the argument.
    """
    texts = [(where, value, _names_secret(where.rpartition(".")[2], value)) for where, value in _texts(arguments)]
    for where, value, named in texts:
        if named:
            remember(where, value)
    secrets = known()
    for where, value, named in texts:
        what = None if named else _found(value, secrets)
        if named and where.startswith("vllm_engine_kwargs."):
            what = "a secret"
        if what is not None:
            raise ValueError(
                f"{redact(where)} contains {what}, and it is written to logs, files and cards. Give a Hub token as "
                "HF_TOKEN, hub_token or model_init_kwargs['token'], a server's password in ~/.netrc."
            )


def _is_secret(name: object, value: object) -> bool:
    """Whether `name` names a secret and `value` may be a secret: no short word, no placeholder."""
    named = _names_secret(name, value) and "<" not in value  # type: ignore[operator]
    return named and len(value.strip()) >= _MIN_GIVEN  # type: ignore[attr-defined]


def _names_secret(name: object, value: object) -> bool:
    texts = isinstance(value, str) and isinstance(name, str)
    return texts and _ARGUMENT_NAME.fullmatch(str(name).replace("-", "_")) is not None


def _texts(value: Any, where: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) for every string and path inside containers and dataclasses."""
    if isinstance(value, (str, PurePath)):
        yield where, str(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < _DEPTH:
        yield from _texts(vars(value), where, depth + 1)
    elif isinstance(value, Mapping) and depth < _DEPTH:
        for key, each in value.items():
            yield from _texts(each, f"{where}.{key}" if where else str(key), depth + 1)
    elif type(value) in (list, tuple, set, frozenset) and depth < _DEPTH:
        for each in value:
            yield from _texts(each, where, depth + 1)
