"""Uploads to the Hugging Face Hub: private unless said otherwise, announced first, all or nothing, and never with a token in any text.

[`push_folder`] uploads a folder that `qerl_trl.publish.export` sealed. Large files go first, and become visible only through the single commit at
the end; an upload that was interrupted is repeated and skips what the Hub already has. `push_adapter`, `push_merged` and `push_base`
export and upload in one go. `publishing.PublishingMixin` puts the same rules in front of `trainer.push_to_hub()` and of pushes while
training.

Only huggingface_hub's public API is used, so its endpoint (`HF_ENDPOINT`), token store and transfer settings apply.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

from .. import checkpoint, redaction
from ..identity import RunSettings
from . import cards, export, outgoing
from .answers import HTTPError, explanation, root_of
from .names import is_hub_id
from .outgoing import Content, HubError
from .records import MERGED_KINDS, Export, Facts
from .run import Exportable, is_trainer, recorded_revision

#: what the Hub itself puts into a new repository
_HUB_FILES = {".gitattributes", "README.md"}
_NOTHING_YET = (
    "{} was there and holds nothing yet: an upload to it was interrupted before its last step, or never begun. Nothing needs doing: this "
    "one goes on, and large files that have arrived are not sent again."
)
#: endpoints and repositories there that this process has made
_made: set[tuple[str, str]] = set()
_ATTEMPTS = 5
_T = TypeVar("_T")


# --- the repository ---------------------------------------------------------------------------------------------------------------


def prepare_repository(
    repo_id: str, private: bool = True, token: str | None = None, notify: Callable[[str], None] = print
) -> tuple[HfApi, str]:
    """Announce, then create the repository or check that the existing one has the visibility asked for.

    Returns:
        The API client, and the full id (`user/name`).

    Raises:
        `HubError`: no token, a refused token, no network, or an existing public repository where a private one is wanted.
    """
    api = _announced(repo_id, private, token, notify)
    return api, _created(api, repo_id, private, notify)


def _announced(repo_id: str, private: bool, token: str | None, notify: Callable[[str], None]) -> HfApi:
    """Before any request: what will be published where; and refuse to begin without a token."""
    token = token or get_token()
    redaction.remember("token", token)
    api = HfApi(token=token)
    visibility = "private: only you and your organization" if private else "PUBLIC: everybody"
    notify(redaction.redact(f"Publishing to {api.endpoint}/{repo_id} ({visibility})"))
    if not token:
        raise HubError(
            "There is no Hub token on this machine, so nothing was uploaded. Create one with write access at "
            f"{api.endpoint}/settings/tokens, then run `hf auth login`, or set HF_TOKEN."
        )
    return api


def _created(api: HfApi, repo_id: str, private: bool, notify: Callable[[str], None]) -> str:
    with _explained(repo_id):
        try:
            repo_id = _retried(lambda: api.create_repo(repo_id, private=private)).repo_id
            _made.add((api.endpoint, repo_id))
        except HfHubHTTPError as error:
            if error.response.status_code not in (403, 409):  # 403: not to be created, but there perhaps
                raise
            repo_id = _retried(lambda: api.create_repo(repo_id, private=private, exist_ok=True)).repo_id
            if (api.endpoint, repo_id) not in _made and not set(
                _retried(lambda: api.list_repo_files(repo_id))
            ) - _HUB_FILES:
                notify(_NOTHING_YET.format(repo_id))
        if not private and api.repo_info(repo_id).private:
            raise HubError(
                f"{repo_id} exists and is private, and a public publication was asked for. Change its visibility in its settings on the "
                "Hub, or publish privately."
            )
        if private and not api.repo_info(repo_id).private:
            raise HubError(
                f"{repo_id} exists and is PUBLIC, and a private publication was asked for, so nothing was uploaded. Choose another name, "
                "or publish there on purpose: private=False (hub_private_repo=False, --public)."
            )
    return repo_id


def make_branch(api: HfApi, repo_id: str, revision: str | None) -> None:
    """A branch that is committed to has to be there; of what is there already nothing changes."""
    if revision is not None and not revision.startswith("refs/"):
        with _explained(repo_id):
            _retried(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Turn what can go wrong on the way to the Hub into a `HubError` that says what to do, without the token."""
    session = get_session()
    waits, session.timeout = session.timeout, _ANSWER_SECONDS  # as huggingface_hub makes it, it waits for ever
    try:
        yield
    except (HfHubHTTPError, HTTPError, OfflineModeIsEnabled, OSError, RuntimeError) as error:
        if isinstance(error, HubError):
            raise
        # not chained: the requests inside carry the token in their headers
        raise HubError(redaction.redact(explanation(error, repo_id))) from None
    finally:
        session.timeout = waits


def _retried(request: Callable[[], _T], attempts: int = _ATTEMPTS, wait: float | None = None) -> _T:
    """Call again after dropped connections and server errors, 1, 2, 4, ... seconds apart."""
    for attempt in range(attempts):
        try:
            return request()
        except (HfHubHTTPError, HTTPError, ConnectionError, TimeoutError, RuntimeError) as error:
            root = root_of(error)
            status = getattr(getattr(root, "response", None), "status_code", None)
            passing = status is None or status >= 500 or status == 429
            last = attempts - 1 if "Timeout" not in type(root).__name__ else 1  # of long waits two
            known = (HfHubHTTPError, HTTPError, ConnectionError, TimeoutError)  # the last two: the xet client's
            if not isinstance(root, known) or not passing or attempt >= last:
                raise
            time.sleep((_WAIT_SECONDS if wait is None else wait) * 2**attempt)
    raise AssertionError


_WAIT_SECONDS = 1.0
#: for the next bytes of an answer
_ANSWER_SECONDS = 120.0


# --- a folder ---------------------------------------------------------------------------------------------------------------------


def push_folder(
    folder: str | os.PathLike,
    repo_id: str,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    message: str | None = None,
    base_model: str | None = None,
    force: bool = False,
    facts: Facts | None = None,
    further: Content | None = None,
    notify: Callable[[str], None] = print,
    allow_other_base: bool = False,
) -> str:
    """Upload a sealed export as the content of `repo_id`, in one commit. Returns the commit's URL.

    Uploading the same again changes nothing. An update of the same kind replaces files and removes stale shards.

    Args:
        base_model: Hub id of the base, for the card and adapter_config.json of an adapter.
        force: publish into a repository that holds something else; its other files stay.
        facts: for the card, over those that the export recorded.
        further: uploaded in the same commit, without a place in the manifest.
        allow_other_base: name a base, here or in adapter_config.json, that holds other weights than the adapter was trained on.

    Raises:
        `ValueError`: the folder is not a whole export, or names a base model that only this machine has, or another one.
        `HubError`: see [`prepare_repository`]; and the repository holds other content.
    """
    folder = Path(folder)
    record = _whole_export(folder)
    files, base = _files(folder, notify), None
    if record["kind"] == "adapter":
        files |= adapter_config(folder, base_model)
        base = base_model or json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    known: Facts = cards.read_facts(folder) or {"kind": record["kind"], "settings": record["settings"]}
    known |= {**(facts or {}), "kind": known["kind"]}
    if base_model:
        known["base_model"] = base_model
    message = message or f"{record['kind'].replace('_', ' ')}, written by qerl-trl"
    manifest = checkpoint.read_manifest(folder)
    notes: list[str] = []

    def look(api: HfApi) -> None:
        # where nobody says another one, it is the base that was trained on, at a commit that was recorded
        if base is not None and (base_model is not None or recorded_revision(record["settings"], base) is None):
            notes.extend(check_base_on_hub(api, base, record["settings"], allow_other_base))

    url = _publish(
        files, manifest, known, repo_id, private, token, revision, message, force, further or {}, notify, look, base
    )
    for note in notes:
        notify(note)
    return url


def push_model(
    folder: str | os.PathLike,
    repo_id: str,
    facts: Facts,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    message: str = "model, written by qerl-trl",
    force: bool = False,
    further: Content | None = None,
    notify: Callable[[str], None] = print,
) -> str:
    """As [`push_folder`], for a run of which every weight was trained: the model in the run's folder or in a checkpoint."""
    folder = Path(folder)
    if wrong := checkpoint.problems(folder):
        raise ValueError(
            f"{folder} cannot be published: {'; '.join(wrong)}. Name a whole checkpoint, or save the model again."
        )
    manifest = checkpoint.read_manifest(folder)
    files = _files(folder, notify)
    return _publish(files, manifest, facts, repo_id, private, token, revision, message, force, further or {}, notify)


def _publish(
    files: Content,
    manifest: checkpoint.Manifest,
    facts: Facts,
    repo_id: str,
    private: bool,
    token: str | None,
    revision: str | None,
    message: str,
    force: bool,
    further: Content,
    notify: Callable[[str], None],
    look: Callable[[HfApi], None] = lambda api: None,
    base: str | None = None,
) -> str:
    """Everything that this package uploads comes through here. `files` and the manifest of their folder; a card is added. `look` may
    refuse before the repository is made; `base` is the Hub id of an adapter's base, for the card."""
    outgoing.check({**files, **further})
    outgoing.check_words(repo_id, revision, message)
    api = _announced(repo_id, private, token, notify)
    look(api)
    repo_id = _created(api, repo_id, private, notify)
    make_branch(api, repo_id, revision)
    facts = {**facts, "repo_id": repo_id}
    if base is not None and (packed := stored_packed(api, base)) is not None:
        facts["base_packed"] = packed
    facts.pop("curves", None)
    content: Content = {**files, "README.md": cards.render(facts).encode()}
    content |= {checkpoint.MANIFEST_NAME: outgoing.manifest_of(content, manifest), **further}
    outgoing.check(content)
    with _explained(repo_id):
        stale = _compare(api, repo_id, revision, content, manifest["run"].get("kind"), force)
        operations = [
            CommitOperationAdd(name, data if isinstance(data, bytes) else str(data)) for name, data in content.items()
        ]
        _retried(lambda: api.preupload_lfs_files(repo_id, operations, revision=revision, free_memory=False))
        commit = _retried(
            lambda: api.create_commit(
                repo_id,
                [*operations, *(CommitOperationDelete(name) for name in stale)],
                commit_message=message,
                revision=revision,
            )
        )
    notify(redaction.redact(f"Published: {commit.commit_url}"))
    return commit.commit_url


def _files(folder: Path, notify: Callable[[str], None]) -> Content:
    """What of a sealed folder is uploaded; `notify` is told what is not."""
    files, left = outgoing.files_of(folder, checkpoint.read_manifest(folder)["files"])
    if left:
        notify(
            f"Not uploaded, because such files are not published: {', '.join(left[:10])}{', ...' if left[10:] else ''}"
        )
    return files


def _whole_export(folder: Path) -> Export:
    found = checkpoint.recorded_run(folder)
    wrong = checkpoint.problems(folder) if (folder / checkpoint.MANIFEST_NAME).is_file() else []
    if "kind" not in found and not wrong:
        raise ValueError(
            f"{folder} was not written by an export of qerl-trl (its {checkpoint.MANIFEST_NAME} is missing or of a checkpoint). Export it "
            "first: qerl-trl merge, qerl-trl quantize, or push a run's folder with: qerl-trl push adapter <run> <user/name>."
        )
    if wrong:
        raise ValueError(f"{folder} is damaged: {'; '.join(wrong)}. Export it again.")
    return cast(Export, found)


def adapter_config(folder: Path, base_model: str | None) -> dict[str, bytes]:
    """adapter_config.json, its base named so that others can load it."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    base = base_model or config.get("base_model_name_or_path") or ""
    require_hub_base(base)
    if base_model is None:
        return {}
    if base != config.get("base_model_name_or_path"):
        config["revision"] = None  # of the base that it named
    return {"adapter_config.json": (json.dumps({**config, "base_model_name_or_path": base}, indent=2) + "\n").encode()}


def check_base_on_hub(api: HfApi, base_model: str, settings: RunSettings, allowed: bool) -> list[str]:
    """Compare the base that an adapter names with the one it was trained on, as far as the repository says what it holds.

    Returns what the user should know.

    Raises:
        `ValueError`: it holds a base with other weights, or a model in which an adapter is merged already; and that is not `allowed`.
    """
    revision, then, wrong = recorded_revision(settings, base_model), settings.get("base_sha256"), ""
    kind: str | None = None
    known: Any = None
    try:
        path = _retried(
            lambda: api.hf_hub_download(base_model, checkpoint.MANIFEST_NAME, revision=revision), attempts=2
        )
        theirs = checkpoint.read_manifest(Path(path).parent)["run"]
        kind, known = theirs.get("kind"), theirs.get("settings", {}).get("base_sha256")
    except RepositoryNotFoundError:
        return [
            f"{base_model} was not found on the Hub with this token: nobody can load the adapter before it is there."
        ]
    except (HfHubHTTPError, HTTPError, OSError, RuntimeError):
        pass  # of somebody else, who writes no manifest
    except ValueError as error:
        wrong = f"does not say what it holds: its {error}"
    if kind in MERGED_KINDS:
        wrong = "holds a merged model: the adapter would be added to what has one in it already"
    elif then is not None and known not in (None, then):
        wrong = (
            f"holds a base with other weights (fingerprint {known[:12]}) than the adapter was trained on ({then[:12]})"
        )
    if wrong and not allowed:
        raise ValueError(
            f"{base_model} {wrong}. Publish the run's own base (qerl-trl merge RUN base --as base, then qerl-trl push base base user/name) and "
            "name that one. To name this one all the same: allow_other_base=True (--allow-other-base)."
        )
    if wrong:
        return [f"{base_model} {wrong}. It is named all the same, as allowed."]
    if revision is not None or (then is not None and known == then):
        return []
    trained_on = (
        f"those that the adapter was trained on (fingerprint {then[:12]})"
        if then
        else "those that the adapter was trained on"
    )
    return [
        f"Nothing on the Hub says which weights {base_model} holds, so that they are {trained_on} is taken on trust."
    ]


def stored_packed(api: HfApi, base: str) -> bool | None:
    """Whether a model on the Hub is stored in quantized layers, which PEFT cannot adapt as they are; `None` where nobody can say."""
    try:
        path = _retried(lambda: api.hf_hub_download(base, "config.json"), attempts=2)
        return "quantization_config" in json.loads(Path(path).read_text())
    except (HfHubHTTPError, HTTPError, OSError, RuntimeError, ValueError):
        return None


def require_hub_base(base: str) -> None:
    """Refuse a base model that others cannot load."""
    if not is_hub_id(base):
        raise ValueError(
            f"The adapter's base is {base!r}, a folder that only this machine has: nobody could load what would be published. Publish the "
            "base first (qerl-trl quantize or merge --as base, then qerl-trl push base <folder> user/name) and name it: base_model='user/name' "
            "(--base-model user/name; while training: hub_base_model='user/name')."
        )


def _compare(
    api: HfApi, repo_id: str, revision: str | None, content: Content, kind_now: str | None, force: bool
) -> list[str]:
    """Files of an older version that have to go. Refuses a repository with another kind of content in it."""
    present = set(_retried(lambda: api.list_repo_files(repo_id, revision=revision)))
    foreign = present - set(content) - _HUB_FILES
    if not present - _HUB_FILES:
        return []
    kind = None
    if checkpoint.MANIFEST_NAME in present:
        theirs = Path(api.hf_hub_download(repo_id, checkpoint.MANIFEST_NAME, revision=revision)).parent
        run = checkpoint.recorded_run(theirs)  # empty where it is damaged: other files
        kind = run.get("kind")
        if run and kind == kind_now:
            return sorted(foreign & set(checkpoint.read_manifest(theirs)["files"]))
    if not force:
        found = f"a {kind.replace('_', ' ')}" if kind else "other files"
        raise HubError(
            f"{repo_id} already contains {found} ({', '.join(sorted(present - _HUB_FILES)[:4])}, ...), so nothing was uploaded. Choose another "
            "name, or add to it on purpose: force=True (--force)."
        )
    return []


# --- export and upload in one go --------------------------------------------------------------------------------------------------


def push_adapter(
    exported: Exportable, repo_id: str, base_model: str | None = None, facts: Facts | None = None, **options: Any
) -> str | None:
    """Save the adapter of a trainer or [`run.TrainedPolicy`] and upload it. `options` as for [`push_folder`]. None on other ranks."""
    return _export_and_push(export.save_adapter, exported, repo_id, facts, {"base_model": base_model, **options})


def push_merged(exported: Exportable, repo_id: str, facts: Facts | None = None, **options: Any) -> str | None:
    """Save the merged bf16 model and upload it. `options` as for [`push_folder`]."""
    return _export_and_push(export.save_merged, exported, repo_id, facts, options)


def push_base(exported: Exportable, repo_id: str, facts: Facts | None = None, **options: Any) -> str | None:
    """Save the NVFP4 base and upload it. `options` as for [`push_folder`]."""
    return _export_and_push(export.save_base, exported, repo_id, facts, options)


def _export_and_push(
    save: Callable[..., Export], exported: Exportable, repo_id: str, facts: Facts | None, options: dict[str, Any]
) -> str | None:
    known = facts or cards.facts_of(exported)
    root = Path((exported.args.output_dir or ".") if is_trainer(exported) else ".")
    # kept after a failure: the next try goes on from there
    folder = root / f"_hub-{save.__name__.removeprefix('save_')}-{repo_id.replace('/', '--')}"
    save(exported, folder, overwrite=True, card=lambda partial, record: cards.write(partial, known, record))
    if is_trainer(exported) and not exported.accelerator.is_main_process:
        return None
    url = push_folder(folder, repo_id, facts=known, **options)
    shutil.rmtree(folder)
    return url
