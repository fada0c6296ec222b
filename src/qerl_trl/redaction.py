"""Secrets stay out of what is written, printed and uploaded: what counts as one, texts without it, and where it may stand.

A secret is a value that was given under a name that says so (an argument such as `hub_token`, `model_init_kwargs={"token": ...}`, an
environment variable such as `WANDB_API_KEY`), the Hub token of this machine, or what has the form of one (`hf_...`, `user:password@` in
a URL, a private key). What we write ourselves is masked ([`redact`], [`cleaned`]); what others wrote and would go out is searched
([`find`], [`find_in`]); an argument that is no place for a secret is refused ([`check_places`]), because its value ends up in names,
logs and cards. Every message names the secret, never shows it.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MASK = "<secret>"
#: names of arguments and options; `eos_token` and its like are none
_ARGUMENT = r"(?:(?:hub|hf|auth|use_auth|access|api|bearer|refresh)_)?token|(?:\w+_)?(?:api_?key|access_key|password|secret)|authorization"
_ARGUMENT_NAME = re.compile(_ARGUMENT, re.IGNORECASE)
_VARIABLE_NAME = re.compile(r"(?:^|_)(?:TOKEN|API_?KEY|PASSWORD|PASSWD|CREDENTIALS?)$|SECRET", re.IGNORECASE)
#: shorter values are no secrets, and would mask ordinary words
_MIN_GIVEN, _MIN_VARIABLE = 8, 12
#: what it is -> strings of which it contains one (a quick test), its form, what stands in its place
_FORMS = {
    "a Hugging Face token": (["hf_"], re.compile(r"hf_(?:[A-Za-z0-9]{20,}|(?:oauth|jwt)_[\w.-]{20,})"), MASK),
    "a Hugging Face organization's token": (["api_org_"], re.compile(r"api_org_[A-Za-z0-9]{20,}"), MASK),
    "a GitHub token": (
        ["ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"],
        re.compile(r"(?:gh[pousr]|github_pat)_\w{30,}"),
        MASK,
    ),
    "an API key": (["sk-"], re.compile(r"sk-(?:proj-|ant-)?[A-Za-z0-9_]{32,}"), MASK),
    "an AWS key": (["AKIA"], re.compile(r"AKIA[0-9A-Z]{16}"), MASK),
    "a private key": (["PRIVATE KEY-----"], re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"), MASK),
    "a password in a URL": (["://"], re.compile(r"""://[^/\s:@"'<>\\]+:[^/\s@"'<>\\]+@"""), f"://{MASK}@"),
    "a token in a URL": (
        ["token=", "key=", "password="],
        re.compile(r"""([?&](?:token|access_token|auth_token|api_?key|password)=)[^&\s"'<>\\]{8,}"""),
        rf"\1{MASK}",
    ),
}
#: `--hub_token X` in a command line
_OPTION = re.compile(rf"""(--(?:{_ARGUMENT.replace("_", "[_-]")})(?:\s+|=))[^\s"'<>\\-][^\s"'<>\\]*""", re.IGNORECASE)
#: weights: text only in their headers
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".distcp")
_HEADER_BYTES = 1 << 20
_given: dict[str, str] = {}


def remember(name: str, value: object) -> None:
    """`value` was given as the argument `name`, which says that it is a secret: it is one wherever it turns up in this process."""
    if type(value) is str and len(value) >= _MIN_GIVEN:
        _given[value] = name


def known() -> dict[str, str]:
    """Secrets of this process and machine -> what they are, in words; longer ones first."""
    from huggingface_hub import get_token

    found = {
        value: f"the value of {name}"
        for name, value in os.environ.items()
        if _VARIABLE_NAME.search(name) and len(value) >= _MIN_VARIABLE
    }
    found |= {value: f"the value of {name}" for value, name in _given.items()}
    if token := get_token():
        found[token] = "the Hub token"
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def redact(text: str) -> str:
    """`text` with every secret masked, and with what follows `--hub_token` and its like."""
    for secret in known():
        text = text.replace(secret, MASK)
    for signs, form, masked in _FORMS.values():
        if any(sign in text for sign in signs):
            text = form.sub(masked, text)
    return _OPTION.sub(rf"\1{MASK}", text)


def cleaned(value: Any, mask: str | None = MASK) -> Any:
    """A copy of dictionaries, lists and tuples in which secrets are masked and values under a secret's name are `mask`.

    Other objects are themselves.
    """
    if type(value) is str:
        return redact(value)
    if isinstance(value, dict):
        return {key: mask if _names_secret(key, each) else cleaned(each, mask) for key, each in value.items()}
    return type(value)(cleaned(each, mask) for each in value) if type(value) in (list, tuple) else value


def find(text: str | bytes) -> str | None:
    """What secret is in `text`, in words; `None` if there is none."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")  # any bytes; a secret is ASCII
    for secret, name in known().items():
        if secret in text:
            return name
    forms = ((name, form) for name, (signs, form, _) in _FORMS.items() if any(sign in text for sign in signs))
    return next((name for name, form in forms if form.search(text)), None)


def find_in(path: Path) -> str | None:
    """As [`find`], for a file. Of weights above 1 MiB the beginning is searched, of everything else all."""
    with open(path, "rb") as file:
        return find(file.read(_HEADER_BYTES if path.suffix in _WEIGHTS else -1))


def check_places(arguments: Mapping[str, Any]) -> None:
    """Remember the secrets among `arguments`; refuse those in an argument whose name does not say so.

    Raises:
        `ValueError`: names the argument.
    """
    for where, value in _texts(arguments):
        name = where.rpartition(".")[2]
        if _names_secret(name, value):
            remember(where, value)
            if where.startswith("vllm_engine_kwargs."):
                raise ValueError(
                    f"{where} is a secret, and an engine logs its arguments. Give a Hub token as HF_TOKEN (or with `hf auth login`), which vLLM "
                    "reads too."
                )
    for where, value in _texts(arguments):
        if not _names_secret(where.rpartition(".")[2], value) and (what := find(value)) is not None:
            raise ValueError(
                f"{where} contains {what}: {redact(value)!r}. It would stand in logs, files and cards. Give a Hub token as HF_TOKEN (or with "
                "`hf auth login`), hub_token or model_init_kwargs['token'], and the password of a server in ~/.netrc."
            )


def _names_secret(name: object, value: object) -> bool:
    return type(value) is str and type(name) is str and _ARGUMENT_NAME.fullmatch(name) is not None


def _texts(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path -> string, for every string inside."""
    if type(value) is str:
        yield where, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(each, f"{where}.{key}" if where else str(key))
    elif type(value) in (list, tuple):
        for each in value:
            yield from _texts(each, where)
