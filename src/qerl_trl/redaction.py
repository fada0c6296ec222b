"""Secrets stay out of what is written, printed and uploaded: what counts as one, texts without it, and where it may stand.

A secret is a value that was given under a name that says so (an argument such as `hub_token`, `model_init_kwargs={"token": ...}`, an
environment variable such as `WANDB_API_KEY`), the Hub token of this machine, or what has the form of one (`hf_...`, `user:password@` in
a URL, a private key). What we write ourselves is masked ([`redact`], [`cleaned`]); what others wrote and would go out is searched
([`find`], [`find_in`]); an argument that is no place for a secret is refused ([`check_places`]), because its value ends up in names,
logs and cards. Every message names the secret, never shows it. A value is a secret also as JSON or a URL writes it.
"""

import dataclasses
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any
from urllib.parse import quote

MASK = "<secret>"
#: names of arguments and options; `eos_token` and its like are none
_ARGUMENT = (
    r"(?:(?:hub|hf|auth|use_auth|access|api|bearer|refresh|github|gitlab|wandb|server|session)_)?token"
    r"|(?:\w+_)?(?:api_?key|access_key|secret_key|private_key|password|passwd|passphrase|secret|credentials?)|(?:\w+_)?authorization"
)
_ARGUMENT_NAME = re.compile(_ARGUMENT, re.IGNORECASE)
_VARIABLE_NAME = re.compile(
    r"(?:(?:^|_)(?:\w*TOKENS?|\w*KEYS?|PAT|AUTH|BEARER|JWT|PWD|\w*PASS(?:WORD|WD|PHRASE)?|CRED(?:ENTIAL)?S?|WEBHOOK(?:_URL)?)|_DSN)"
    # which of several
    r"(?:_(?:\d+|READ|WRITE|RO|RW|ADMIN|PROD|PRODUCTION|STAGING|DEV|TEST|CI|MAIN|BACKUP|OLD|NEW))*$|SECRET",
    re.IGNORECASE,
)
#: variables so named that the shell sets, and others that hold no secret
_HARMLESS_VARIABLE = re.compile(
    r"(?:OLD)?PWD|SSH_ASKPASS|(?:\w+_)?(?:CACHE|SORT|PRIMARY|PUBLIC|HOST|HOT)_?KEYS?(?:_\w+)?"
    r"|(?:\w+_)?(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|STOP|START|END|IMAGE|MAX|MIN|NUM|NEW|SPECIAL)_?TOKENS?(?:_\w+)?",
    re.IGNORECASE,
)
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
    "a GitLab token": (["glpat-"], re.compile(r"glpat-[\w-]{20,}"), MASK),
    "an API key": (
        ["sk-", "AIza", "xox"],
        re.compile(
            r"\bsk-(?:proj|ant|svcacct|admin|or)-[\w-]{32,}|\bsk-[A-Za-z0-9_]{32,}|\bAIza[\w-]{35}|\bxox[abeoprs]-[\w-]{20,}"
        ),
        MASK,
    ),
    "an AWS key": (["AKIA"], re.compile(r"AKIA[0-9A-Z]{16}"), MASK),
    "a private key": (
        ["PRIVATE KEY-----"],
        # to its end, whether lines are broken or written as JSON does
        re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\w+/=\s\\:,.-]*?-----END [A-Z ]*PRIVATE KEY-----)?"),
        MASK,
    ),
    # a name alone is none, unless it is as long as a token
    "a password in a URL": (
        ["://"],
        re.compile(r"""://(?:[^/\s:@"'<>\\]*:[^/\s@"'<>\\]+|[^/\s:@"'<>\\]{20,})@"""),
        f"://{MASK}@",
    ),
    "a token in a URL": (
        ["="],
        re.compile(
            r"""([?&](?:(?:[a-z-]+[_-])?token|(?:(?:api|access|secret)[_-]?)?key|password|sig|(?:x-amz-)?signature)=)[^&\s"'<>\\]{8,}""",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    "an HTTP authorization": (
        ["earer ", "EARER ", "asic ", "ASIC "],
        re.compile(r"(authorization\W{1,6}(?:bearer|basic)\s+|\bbearer\s+)(?=\S*\d)[\w.~+/=-]{16,}", re.IGNORECASE),
        rf"\1{MASK}",
    ),
}
_NAMED = _ARGUMENT.replace("_", "[_-]")
#: `--hub_token X` in a command line
_OPTION = re.compile(rf"""(--(?:{_NAMED})(?:\s+|=)["']?)[^\s"'<>\\-][^\s"'<>\\]*""", re.IGNORECASE)
#: `{"token": "X"}`, `hub_token='X'`: what a command line, a configuration or a traceback quotes
_ASSIGNED = re.compile(r"""(?<![\w-])([\w-]++)((?:\\*["'])?\s*[:=]\s*\\*["'])([^"'\\<]{8,})""")
#: before the secret in a header
_SCHEME = re.compile(r"^(?:bearer|basic)\s+", re.IGNORECASE)
#: weights: text only in their headers
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".distcp")
_HEADER_BYTES = 1 << 20
#: of arguments inside arguments
_DEPTH = 8
_given: dict[str, str] = {}


def remember(name: str, value: object) -> None:
    """`value` was given as the argument `name`, which says that it is a secret: it is one wherever it turns up in this process."""
    if isinstance(value, str) and len(value := _SCHEME.sub("", value.strip())) >= _MIN_GIVEN:
        _given[value] = name


def known() -> dict[str, str]:
    """Secrets of this process and machine -> what they are, in words; longer ones first."""
    from huggingface_hub import get_token

    found = {
        value: f"the value of {name}"
        for name, value in ((name, value.strip()) for name, value in os.environ.items())  # as whoever uses it reads it
        if len(value) >= _MIN_VARIABLE and _is_secret_variable(name) and not os.path.exists(value)
    }
    found |= {value: f"the value of {name}" for value, name in _given.items()}
    if token := get_token():
        found[token] = "the Hub token"
    found |= {written: name for value, name in found.items() for written in _written(value)}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _is_secret_variable(name: str) -> bool:
    return _VARIABLE_NAME.search(name) is not None and _HARMLESS_VARIABLE.fullmatch(name) is None


def _written(value: str) -> set[str]:
    """How a value may stand in JSON, in a URL, and in what Python quotes."""
    as_json = {json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)}
    return {*as_json, quote(value), quote(value, safe=""), repr(value)[1:-1]}


def redact(text: str) -> str:
    """`text` with every secret masked, and with what follows `--hub_token` and its like."""
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
    """The words of a command line, as [`redact`] leaves them: also where `--hub_token` and its value are two of them."""
    found: list[str] = []
    for word in words:
        follows = bool(found) and _OPTION.search(f"{found[-1]} x") is not None and "=" not in found[-1]
        found.append(MASK if follows else redact(word))
    return found


def cleaned(value: Any, mask: str | None = MASK) -> Any:
    """A copy of dictionaries, lists and tuples in which secrets are masked and values under a secret's name are `mask`.

    Other objects are themselves.
    """
    if isinstance(value, str):
        return redact(value) if type(value) is str else value
    if isinstance(value, dict):
        return {key: mask if _names_secret(key, each) else cleaned(each, mask) for key, each in value.items()}
    return type(value)(cleaned(each, mask) for each in value) if type(value) in (list, tuple) else value


def find(text: str | bytes, is_json: bool = False) -> str | None:
    """What secret is in `text`, in words; `None` if there is none. `is_json`: also what a key in it says to be one."""
    return _found(text, known()) or (_named_in_json(text) if is_json else None)


def _found(text: str | bytes, secrets: Mapping[str, str]) -> str | None:
    if isinstance(text, bytes):
        content, text = text, text.decode("latin-1")  # any bytes; a form is ASCII
        is_there = [name for secret, name in secrets.items() if secret.encode() in content]
    else:
        is_there = [name for secret, name in secrets.items() if secret in text]
    if is_there:
        return is_there[0]
    forms = ((name, form) for name, (signs, form, _) in _FORMS.items() if any(sign in text for sign in signs))
    return next((name for name, form in forms if form.search(text)), None)


def _named_in_json(text: str | bytes) -> str | None:
    """Read as JSON, because a vocabulary may have `token":` in it."""
    named: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        named.extend(f"a secret, by the name of {key!r}" for key, value in pairs if _is_secret(key, value))

    try:
        json.loads(text, object_pairs_hook=look)
    except (ValueError, RecursionError):  # no JSON; others say so
        return None
    return named[0] if named else None


def find_in(path: Path) -> str | None:
    """As [`find`], for a file. Of weights above 1 MiB the beginning is searched, of everything else all."""
    with open(path, "rb") as file:
        return find(file.read(_HEADER_BYTES if path.suffix in _WEIGHTS else -1), path.suffix == ".json")


def check_places(arguments: Mapping[str, Any]) -> None:
    """Remember the secrets among `arguments`; refuse those in an argument whose name does not say so, or that is written where it goes.

    Raises:
        `ValueError`: names the argument.
    """
    kept = _made_with(arguments.get("processing_class"))
    for where, value in _texts({**arguments, **kept}):
        name = where.rpartition(".")[2]
        if _names_secret(name, value):
            remember(where, value)
            if where.startswith("vllm_engine_kwargs."):
                raise ValueError(
                    f"{redact(where)} is a secret, and an engine logs its arguments. Give a Hub token as HF_TOKEN (or with `hf auth login`), which "
                    "vLLM reads too."
                )
            if where.startswith("processing_class") and _is_secret(name, value):
                raise ValueError(
                    f"{redact(where)} is a secret, and a tokenizer or processor keeps the arguments that it was made with: it would stand in the "
                    "tokenizer_config.json of every checkpoint and of what is published. Load it without. A Hub token is read from HF_TOKEN (or "
                    "`hf auth login`), or given as token=..., which is not kept."
                )
    secrets = known()
    for where, value in _texts({**arguments, **kept}):
        if not _names_secret(where.rpartition(".")[2], value) and (what := _found(value, secrets)) is not None:
            raise ValueError(
                f"{redact(where)} contains {what}: {redact(value)!r}. It would stand in logs, files and cards. Give a Hub token as HF_TOKEN (or with "
                "`hf auth login`), hub_token or model_init_kwargs['token'], and the password of a server in ~/.netrc."
            )


def _made_with(processing_class: Any) -> dict[str, Mapping[str, Any]]:
    """What a tokenizer, or a processor with its parts, writes into its files beside the vocabulary: the arguments that it keeps."""
    own = getattr(processing_class, "__dict__", {})
    parts = {f"processing_class.{name}": part for name, part in own.items() if hasattr(part, "save_pretrained")}
    written = {
        where: getattr(part, "init_kwargs", None) or getattr(part, "__dict__", {})
        for where, part in ({"processing_class": processing_class} | parts).items()
    }
    return {w: {n: v for n, v in kwargs.items() if n not in ("vocab", "merges")} for w, kwargs in written.items()}


def _is_secret(name: object, value: object) -> bool:
    """Whether `name` says that `value` is one, and it may be: no short word, no placeholder."""
    return _names_secret(name, value) and "<" not in value and len(value.strip()) >= _MIN_GIVEN  # type: ignore[operator,attr-defined]


def _names_secret(name: object, value: object) -> bool:
    return (
        isinstance(value, str)
        and isinstance(name, str)
        and _ARGUMENT_NAME.fullmatch(name.replace("-", "_")) is not None
    )


def _texts(value: Any, where: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Dotted path -> string, for every string and path inside, in dataclasses too (an adapter's or accelerate's configuration); for the keys of
    dictionaries inside, the path of their dictionary."""
    if isinstance(value, (str, PurePath)):
        yield where, str(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type) and depth < _DEPTH:
        yield from _texts(vars(value), where, depth + 1)
    elif isinstance(value, Mapping) and depth < _DEPTH:
        for key, each in value.items():
            if where and isinstance(key, str):
                yield f"{where} (a key)", key
            yield from _texts(each, f"{where}.{key}" if where else str(key), depth + 1)
    elif type(value) in (list, tuple, set, frozenset) and depth < _DEPTH:
        for each in value:
            yield from _texts(each, where, depth + 1)


# --- what others print ------------------------------------------------------------------------------------------------------------


class _Masked(logging.Filter):
    """Lets everything through, without secrets."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if (masked := redact(text)) != text:
            record.msg, record.args = masked, ()
        if record.exc_info and record.exc_info[0] is not None:
            text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
            if (masked := redact(text)) != text:
                record.exc_text, record.exc_info = masked, None  # which every formatter appends
        return True


_masked = _Masked()


def mask_others() -> None:
    """[`mask_requests`] and [`mask_tracebacks`]."""
    mask_requests()
    mask_tracebacks()


def mask_requests() -> None:
    """From now on, what the HTTP libraries of the Hub's client log of a request has no secret in it: it is the whole URL, and the Hub's address
    (`HF_ENDPOINT`) may have a password in it."""
    for name in ("httpx", "httpx2", "huggingface_hub.utils._http", "urllib3.connectionpool"):
        logging.getLogger(name).addFilter(_masked)  # once, however often


def mask_tracebacks() -> None:
    """From now on, what Python prints of an error that nobody catches has no secret in it: a library's error may quote a URL or a header.

    For scripts, commands and trainers, in threads too, where an object is removed, and of a task or a future that nobody waited for. Where another
    hook is set (a debugger's, a notebook's), that one stays. A `multiprocessing.Process` has no hook.
    """
    for name in ("asyncio", "concurrent.futures"):
        logging.getLogger(name).addFilter(_masked)  # once, however often
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_masked
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _print_masked_of_a_thread
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _print_masked_of_an_object


def _print_masked_of_an_object(ended: "sys.UnraisableHookArgs") -> None:
    if ended.exc_value is None:
        return
    sys.stderr.write(redact(f"{ended.err_msg or 'Exception ignored in'}: {ended.object!r}\n"))
    print_masked(ended.exc_type, ended.exc_value, ended.exc_traceback)


def _print_masked_of_a_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is SystemExit or ended.exc_value is None:
        return
    name = ended.thread.name if ended.thread is not None else threading.get_ident()
    sys.stderr.write(f"Exception in thread {name}:\n")
    print_masked(ended.exc_type, ended.exc_value, ended.exc_traceback)


def print_masked(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A `sys.excepthook`: the interpreter's own, without secrets."""
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))
