"""Uploads to the Hub: private by default, announced first, in one commit, and never with a token in any text.

[`push_folder`] uploads a folder sealed by `publish.export`. Large files go first and become visible with the single
commit at the end; a repeated upload skips files already on the Hub. `push_adapter` exports and uploads.
"""

import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

from ..checkpoint import seal
from ..checkpoint.records import MERGED_KINDS, Export, Facts, is_hub_id
from ..checkpoint.settings import RunSettings
from ..support import secrets
from . import card, export, outgoing
from .load import Exportable, is_trainer, recorded_revision
from .outgoing import Content, HubError

logger = logging.getLogger(__name__)

#: base of all HTTP errors, also without an answer: of httpx, from huggingface_hub 2 on of httpx2
_HTTPError: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
_FAILED = (HfHubHTTPError, _HTTPError, OSError, RuntimeError)
#: files created by the Hub in a new repository
_HUB_FILES = {".gitattributes", "README.md"}
_ATTEMPTS, _WAIT_SECONDS = 5, 1.0
#: timeout for the next bytes of an answer
_ANSWER_SECONDS = 120.0
_T = TypeVar("_T")


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Turn errors on the way to the Hub into a `HubError` with a remedy, without the token."""
    session = get_session()
    waits, session.timeout = session.timeout, _ANSWER_SECONDS  # huggingface_hub has no timeout
    try:
        yield
    except _FAILED as error:
        # not chained: the requests inside have the token in their headers
        raise HubError(secrets.redact(f"{_explanation(error, repo_id)} Nothing was published.")) from None
    finally:
        session.timeout = waits


def _explanation(error: Exception, repo_id: str) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return "huggingface_hub is in offline mode (HF_HUB_OFFLINE=1). Unset it to publish."
    root, status = _root_of(error)
    if status == 401:
        return "The Hub refused the token (401). Log in again with `hf auth login`, or set a valid HF_TOKEN."
    if status == 403:
        return f"The token may not write to {repo_id} (403). Use one with write access, and a namespace that is yours."
    if status is not None:
        return f"The Hub answered {status} for {repo_id}: {root}. Try the same command again later."
    what = f"The connection to the Hub failed ({type(root).__name__}: {root})."
    return f"{what} Run the same command again: files that arrived are not sent twice."


def _root_of(error: BaseException) -> tuple[BaseException, int | None]:
    """Find the first HTTP or connection error behind an exception (a failed upload raises RuntimeError), its status."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (HfHubHTTPError, _HTTPError, ConnectionError, TimeoutError)):
        cause = cause.__cause__
    root = error if cause is None else cause
    return root, root.response.status_code if isinstance(root, HfHubHTTPError) else None


def _retried(request: Callable[[], _T], attempts: int = _ATTEMPTS) -> _T:
    """Retry after dropped connections and server errors, 1, 2, 4, ... seconds apart; after a timeout once."""
    attempt = 1
    while True:
        try:
            return request()
        except _FAILED as error:
            root, status = _root_of(error)
            passing = root is not error or not isinstance(error, RuntimeError)
            passing = passing and (status is None or status >= 500 or status == 429)
            if not passing or attempt >= (attempts if "Timeout" not in type(root).__name__ else 2):
                raise
            time.sleep(_WAIT_SECONDS * 2 ** (attempt - 1))
            attempt += 1


# --- the repository ---------------------------------------------------------------------------------------------------


def prepare_repository(
    repo_id: str,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    notify: Callable[[str], None] = print,
) -> str:
    """Announce, then create the repository and its branch, or check an existing one's visibility. Returns `user/name`.

    Raises:
        `HubError`: no token, a refused token, no network, or the repository is public and a private one was requested.
    """
    return _created(_announced(repo_id, private, token, notify), repo_id, private, revision)


def _announced(repo_id: str, private: bool, token: str | None, notify: Callable[[str], None]) -> HfApi:
    """Announce the publication, and raise `HubError` without a token."""
    token = token or get_token()
    secrets.remember("token", token)
    api = HfApi(token=token)
    visibility = "private: only you and your organization" if private else "PUBLIC: everybody"
    notify(secrets.redact(f"Publishing to {api.endpoint}/{repo_id} ({visibility})"))
    if not token:
        raise HubError(
            "There is no Hub token on this machine, so nothing was uploaded. Create one with write access at "
            f"{api.endpoint}/settings/tokens, then run `hf auth login`, or set HF_TOKEN."
        )
    return api


def _created(api: HfApi, repo_id: str, private: bool, revision: str | None) -> str:
    with _explained(repo_id):
        repo_id = _retried(lambda: api.create_repo(repo_id, private=private, exist_ok=True)).repo_id
        is_private = api.repo_info(repo_id).private
    if is_private != private:
        there, asked, remedy = (
            "PUBLIC",
            "private",
            "publish there on purpose: private=False (--public, hub_private_repo=False)",
        )
        if is_private:
            there, asked, remedy = "private", "public", "change its visibility on the Hub"
        raise HubError(
            f"{repo_id} exists and is {there}, but a {asked} publication was requested, so nothing was uploaded. "
            f"Choose another name, or {remedy}."
        )
    if revision is not None and not revision.startswith("refs/"):
        with _explained(repo_id):
            _retried(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
    return repo_id


# --- a folder ---------------------------------------------------------------------------------------------------------


def push_folder(
    folder: str | os.PathLike,
    repo_id: str,
    base_model: str | None = None,
    facts: Facts | None = None,
    allow_other_base: bool = False,
    notify: Callable[[str], None] = print,
    message: str | None = None,
    **options: Any,
) -> str:
    """Upload a sealed export as the content of `repo_id`, in one commit. Returns the commit's URL.

    Uploading the same export again changes nothing. An update of the same kind replaces files and removes stale shards.

    Args:
        base_model: Hub id of the base, for the card and adapter_config.json of an adapter.
        facts: for the card, overriding the recorded ones.
        allow_other_base: accept a base, here or in adapter_config.json, with other weights than the run's.
        options: `private` (default: True), `token`, `revision`; `force`: publish into a repository with other content,
            kept there; `further`: files for the same commit, outside the manifest.

    Raises:
        `ValueError`: the folder is not a complete export, or names a local or a wrong base model.
        `HubError`: see [`prepare_repository`]; and the repository has other content.
    """
    folder = Path(folder)
    _require_whole(folder, export=True)
    record = cast(Export, seal.recorded_run(folder))
    files, base = _files(folder, notify), None
    if record["kind"] == "adapter":
        files |= adapter_config(folder, base_model)
        base = base_model or json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    known: Facts = card.read_facts(folder) or {"kind": record["kind"], "settings": record["settings"]}
    known |= {**(facts or {}), "kind": known["kind"]}
    if base_model:
        known["base_model"] = base_model

    def look(api: HfApi) -> None:
        # by default the run's base, at its recorded commit
        named = base is not None and (base_model is not None or recorded_revision(record["settings"], base) is None)
        if named and (said := check_base_on_hub(api, str(base), record["settings"], allow_other_base)):
            notify(said)
        if base is not None and (packed := _stored_packed(api, base)) is not None:
            known["base_packed"] = packed

    message = message or f"{record['kind'].replace('_', ' ')}, written by qerl-trl"
    return _publish(folder, files, known, repo_id, message, notify, look, **options)


def push_model(
    folder: str | os.PathLike,
    repo_id: str,
    facts: Facts,
    notify: Callable[[str], None] = print,
    message: str = "model, written by qerl-trl",
    **options: Any,
) -> str:
    """[`push_folder`] after full fine-tuning: from the run's folder or a checkpoint."""
    folder = Path(folder)
    _require_whole(folder)
    return _publish(folder, _files(folder, notify), facts, repo_id, message, notify, **options)


def _publish(
    folder: Path,
    files: Content,
    facts: Facts,
    repo_id: str,
    message: str,
    notify: Callable[[str], None],
    look: Callable[[HfApi], None] = lambda api: None,
    *,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    force: bool = False,
    further: Content | None = None,
) -> str:
    """Upload `files` with a card; all uploads end here. `look` may raise before the repository is created."""
    outgoing.check({**files, **(further or {})})
    outgoing.check_words(repo_id, revision, message)
    api, manifest = _announced(repo_id, private, token, notify), seal.read_manifest(folder)
    look(api)
    repo_id = _created(api, repo_id, private, revision)
    facts = {**facts, "repo_id": repo_id}
    content: Content = {**files, "README.md": card.render(facts).encode()}
    content |= {seal.MANIFEST_NAME: outgoing.manifest_of(content, manifest), **(further or {})}
    outgoing.check(content)
    with _explained(repo_id):
        stale, others = _compare(api, repo_id, revision, content, manifest["run"].get("kind"))
    if others and not force:
        raise HubError(
            f"{repo_id} already contains {others}, so nothing was uploaded. Choose another name, or add to it on "
            "purpose: force=True (--force)."
        )
    with _explained(repo_id):
        added = [CommitOperationAdd(name, data) for name, data in content.items()]
        _retried(lambda: api.preupload_lfs_files(repo_id, added, revision=revision, free_memory=False))
        changes: list[Any] = [*added, *map(CommitOperationDelete, stale)]
        commit = _retried(lambda: api.create_commit(repo_id, changes, commit_message=message, revision=revision))
    notify(secrets.redact(f"Published: {commit.commit_url}"))
    return commit.commit_url


def _files(folder: Path, notify: Callable[[str], None]) -> Content:
    """Return the files of a sealed folder to upload; `notify` gets the names of the others."""
    files, left = outgoing.files_of(folder, seal.read_manifest(folder)["files"])
    if left:
        more = ", ..." if left[10:] else ""
        notify(f"Not uploaded, because such files are not published: {', '.join(left[:10])}{more}")
    return files


def _require_whole(folder: Path, export: bool = False) -> None:
    """Refuse a folder changed since it was sealed; for an `export`, also a run's folder."""
    wrong = seal.problems(folder)
    if export and not wrong and "kind" not in seal.recorded_run(folder):
        wrong = [f"its {seal.MANIFEST_NAME} describes a run"]
    if wrong:
        raise ValueError(
            f"{folder} cannot be published: {'; '.join(wrong)}. Name a whole checkpoint, or export it: qerl-trl merge, "
            "qerl-trl quantize, or for a run qerl-trl push adapter <run> <user/name>."
        )


def _compare(
    api: HfApi, repo_id: str, revision: str | None, content: Content, kind_now: str | None
) -> tuple[list[str], str]:
    """Return (files of an earlier push to delete, other kind of content in the repository)."""
    present = set(_retried(lambda: api.list_repo_files(repo_id, revision=revision)))
    if not present - _HUB_FILES:
        return [], ""
    kind = None
    if seal.MANIFEST_NAME in present:
        theirs = Path(api.hf_hub_download(repo_id, seal.MANIFEST_NAME, revision=revision)).parent
        run = seal.recorded_run(theirs)  # empty for a damaged manifest
        kind = run.get("kind")
        if run and kind == kind_now:
            return sorted((present - set(content)) & set(seal.read_manifest(theirs)["files"])), ""
    return [], f"a {kind.replace('_', ' ')}" if kind else "other files"


def require_hub_base(base: str) -> None:
    """Refuse a base model that others cannot load."""
    if not is_hub_id(base):
        raise ValueError(
            f"The adapter's base is {base!r}, a folder that only this machine has: nobody could load it. Publish it "
            "first (qerl-trl push base), then pass base_model='user/name' (--base-model, hub_base_model)."
        )


def adapter_config(folder: Path, base_model: str | None) -> dict[str, bytes]:
    """Return adapter_config.json naming `base_model`, if given. Refuses a base that others cannot load."""
    config = json.loads((folder / "adapter_config.json").read_text())
    require_hub_base(base_model or config.get("base_model_name_or_path") or "")
    if base_model is None:
        return {}
    if base_model != config.get("base_model_name_or_path"):
        config["revision"] = None  # a commit of the previous base
    content = json.dumps({**config, "base_model_name_or_path": base_model}, indent=2) + "\n"
    return {"adapter_config.json": content.encode()}


def check_base_on_hub(api: HfApi, base_model: str, settings: RunSettings, allowed: bool) -> str | None:
    """Compare the base named by an adapter with the run's, by its manifest. Returns a note for the user."""
    revision, then, known = recorded_revision(settings, base_model), settings.get("base_sha256"), None
    wrong = ""
    try:
        path = _retried(lambda: api.hf_hub_download(base_model, seal.MANIFEST_NAME, revision=revision), 2)
        theirs = seal.recorded_run(Path(path).parent)
        known = theirs.get("settings", {}).get("base_sha256")
        if theirs.get("kind") in MERGED_KINDS:
            wrong = "holds a merged model, which contains an adapter already"
        elif then is not None and known not in (None, then):
            other = f"other weights (fingerprint {known[:12]}) than the adapter was trained on ({then[:12]})"
            wrong = f"holds a base with {other}"
    except RepositoryNotFoundError:
        return f"{base_model} was not found on the Hub with this token: nobody can load the adapter until it is there."
    except _FAILED:
        pass  # published by others, without a manifest
    if wrong and not allowed:
        raise ValueError(
            f"{base_model} {wrong}. Publish the run's own base (qerl-trl merge RUN base --as base, then qerl-trl push "
            "base base user/name) and name that one. To use this one anyway: allow_other_base=True "
            "(--allow-other-base)."
        )
    if wrong:
        return f"{base_model} {wrong}. It is used anyway, as allowed."
    if revision is not None or (then is not None and known == then):
        return None
    trained_on = f"those the adapter was trained on{f' (fingerprint {then[:12]})' if then else ''}"
    return f"The Hub has no record of the weights in {base_model}: that they are {trained_on} is not verified."


def _stored_packed(api: HfApi, base: str) -> bool | None:
    """True if a model on the Hub has quantized layers; `None` if unknown."""
    try:
        path = _retried(lambda: api.hf_hub_download(base, "config.json"), 2)
        return "quantization_config" in json.loads(Path(path).read_text())
    except (*_FAILED, ValueError):
        return None


def push_adapter(
    exported: Exportable, repo_id: str, base_model: str | None = None, facts: Facts | None = None, **options: Any
) -> str | None:
    """Save a trainer's or policy's adapter and upload it. `options` as for [`push_folder`]. None on other ranks."""
    known = facts or card.facts_of(exported)
    root = Path((exported.args.output_dir or ".") if is_trainer(exported) else ".")
    # kept after a failure: the next attempt resumes
    folder = root / f"_hub-adapter-{repo_id.replace('/', '--')}"
    export.save_adapter(
        exported, folder, None, base_model, True, lambda partial, record: card.write(partial, known, record)
    )
    if is_trainer(exported) and not exported.accelerator.is_main_process:
        return None
    url = push_folder(folder, repo_id, base_model, known, **options)
    shutil.rmtree(folder)
    return url


# --- while training ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Destination:
    """Where a run is published. `base_model`: Hub id of the base of an adapter trained on a local folder."""

    repo_id: str
    private: bool
    token: str | None
    revision: str | None
    base_model: str | None
    adapter: bool

    def command(self, folder: str | os.PathLike) -> str:
        """Return the command that publishes the run in `folder` from its files."""
        words = ["qerl-trl", "push", "adapter" if self.adapter else "model", str(folder), self.repo_id]
        words += ["--public"] * (not self.private)
        words += ["--base-model", self.base_model] if self.adapter and self.base_model else []
        words += ["--revision", self.revision] if self.revision else []
        return shlex.join(words)

    def unpublished(self, error: HubError, folder: str) -> HubError:
        """Return the error of a trainer's push, with the command for publishing later."""
        if not Path(folder, seal.MANIFEST_NAME).is_file():
            return error
        return HubError(
            f"{error} Publish the saved folder {folder}, without training again, with: {self.command(folder)}"
        )


def push_run(
    folder: Path, repo_id: str, facts: Facts, adapter: bool, base_model: str | None = None, **options: Any
) -> str:
    """Upload the model or adapter of a run's folder or checkpoint, from its files. `options`: [`push_folder`]."""
    if not adapter:
        return push_model(folder, repo_id, facts, **options)
    exported = folder.with_name(f".push-{folder.name}")
    try:
        export.copy_adapter(folder, exported, lambda partial, record: card.write(partial, facts, record))
        return push_folder(exported, repo_id, base_model, facts, **options)
    finally:
        shutil.rmtree(exported, ignore_errors=True)


def push_checkpoint(folder: Path, to: Destination, facts: Facts, message: str, keep_as: str | None) -> str:
    """Upload a sealed checkpoint with a card, and the files for a resume as the folder `keep_as`."""
    further: Content = {}
    if keep_as is not None:
        changed = adapter_config(folder, to.base_model) if to.adapter else {}
        further = outgoing.checkpoint_files(folder, keep_as, changed)
    where: dict[str, Any] = {"private": to.private, "token": to.token, "revision": to.revision, "message": message}
    where |= {"force": True, "further": further, "notify": logger.info}  # the repository is this run's
    return push_run(folder, to.repo_id, facts, to.adapter, to.base_model, **where)
