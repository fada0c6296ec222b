"""Files allowed to leave this machine: an allow list of names, and a scan for secrets.

[`files_of`] assembles every upload of this package; [`check`] scans it for secrets in `hub`, the only sender. Other
files stay here: `training_args.bin`, optimizer states, logs, completions, notes. Only a checkpoint pushed for resuming
(`hub_strategy="checkpoint"` and `"all_checkpoints"`) includes the files for it, in its own folder.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..checkpoint import seal
from ..nvfp4.headers import check_inside
from ..support import secrets

#: repository path -> file to send, or its content
Content = dict[str, Path | bytes]

_PUBLISHED = re.compile(
    r"README\.md|(?:LICENSE|LICENCE|NOTICE|COPYING)(?:\.txt|\.md)?"
    r"|(?:config|generation_config|(?:\w+/)?adapter_config|(?:video_)?preprocessor_config|processor_config)\.json"
    r"|(?:tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template|tekken)\.json"
    r"|(?:vocab|merges)\.txt"
    r"|[\w.-]+\.(?:tiktoken|model)|(?:additional_chat_templates/)?[\w.-]+\.jinja"
    r"|(?:model|(?:\w+/)?adapter_model)(?:-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    rf"|{re.escape(seal.MANIFEST_NAME)}|qerl_card\.json|quantization_report\.json"
)
#: files read by a resumed run, besides the model
_RESUMED = re.compile(
    r"trainer_state\.json|(?:optimizer|scheduler|scaler)\.pt|optimizer\.bin|rng_state(?:_\d+)?\.pth"
    r"|reference_model\.safetensors|(?:optimizer|pytorch_model_fsdp)_0/(?:__\d+_\d+\.distcp|\.metadata)"
)
_CHECKPOINT = re.compile(r"(?:last-checkpoint|checkpoint-\d+)/(.+)")


class HubError(RuntimeError):
    """A failed publication and its cause. Nothing is visible on the Hub unless the message says otherwise."""


def may_leave(name: str) -> bool:
    """True if a file may be uploaded as `name`, its path in the repository."""
    within = _CHECKPOINT.fullmatch(name)
    if within is None:
        return _PUBLISHED.fullmatch(name) is not None
    return any(names.fullmatch(within[1]) for names in (_PUBLISHED, _RESUMED))


def files_of(folder: Path, names: Iterable[str], below: str = "") -> tuple[Content, list[str]]:
    """Return the allowed files among `names` in `folder` (uploaded into `below`), and the other names."""
    names = sorted(names)
    allowed = [name for name in names if may_leave(f"{below}/{name}" if below else name)]
    check_inside(folder, [folder / name for name in allowed])
    return {name: folder / name for name in allowed}, [name for name in names if name not in allowed]


def checkpoint_files(folder: Path, below: str, changed: Mapping[str, bytes]) -> Content:
    """Collect the files for resuming from a checkpoint, in the repository's folder `below`, with `changed` contents."""
    sealed = seal.read_manifest(folder)
    files, _ = files_of(folder, sealed["files"].keys() - {"README.md"}, below)  # PEFT's template
    files |= changed
    files[seal.MANIFEST_NAME] = manifest_of(files, sealed)
    return {f"{below}/{name}": data for name, data in files.items()}


def manifest_of(content: Mapping[str, Path | bytes], sealed: seal.Manifest) -> bytes:
    """Return the folder's manifest (`sealed`), reduced to the uploaded files and texts."""
    files = {name: sealed["files"][name] for name in content if name in sealed["files"]}
    for name, data in content.items():
        if isinstance(data, bytes) and name != seal.MANIFEST_NAME:
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return (
        json.dumps(seal.manifest(files, sealed["run"], sealed.get("order")), indent=2, sort_keys=True) + "\n"
    ).encode()


def check_words(repo_id: str, revision: str | None, message: str) -> None:
    """[`check`] for repository name, revision and commit message."""
    words = {"The name of the repository": repo_id, "Its revision": revision or "", "The commit message": message}
    for where, text in words.items():
        if (what := secrets.find(text)) is not None:
            raise HubError(
                f"{where} contains {what}, so nothing was uploaded: {secrets.redact(text)!r}. Leave the secret out."
            )


def check(content: Mapping[str, Path | bytes]) -> None:
    """Refuse a file with a secret."""
    for name, data in content.items():
        where = name if isinstance(data, bytes) else data
        is_json = name.endswith(".json")
        what = secrets.find(data, is_json) if isinstance(data, bytes) else secrets.find_in(data)
        if what is not None:
            raise HubError(
                f"{where} contains {what}, so nothing was uploaded. Remove it from the file, and revoke it if others "
                "may have seen it."
            )
