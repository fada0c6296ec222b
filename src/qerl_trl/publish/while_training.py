"""Pushes while a run trains: one at a time, in a thread, each a single commit; one that failed is told at once and not forgotten.

What is pushed is a snapshot of a sealed checkpoint (links to its files), so that training goes on and older checkpoints may be removed
meanwhile. The snapshot of a push that failed is kept until a later push has ended: [`Pushes.retry`] is the last attempt.
"""

import logging
import os
import shlex
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import checkpoint, redaction
from . import cards, export, hub, outgoing
from .outgoing import Content, HubError
from .records import Facts

logger = logging.getLogger(__name__)

_SNAPSHOT = ".push-"


@dataclass(frozen=True)
class Destination:
    """Where a run is published, and as what. `base_model`: Hub id of the base of an adapter that was trained on a local folder."""

    repo_id: str
    private: bool
    token: str | None
    revision: str | None
    base_model: str | None
    adapter: bool

    def command(self, folder: str | os.PathLike) -> str:
        """What publishes the run in `folder` from its files alone."""
        words = ["qerl-trl", "push", "adapter" if self.adapter else "model", str(folder), self.repo_id]
        words += [] if self.private else ["--public"]
        words += ["--base-model", self.base_model] if self.adapter and self.base_model else []
        words += ["--revision", self.revision] if self.revision else []
        return shlex.join(words)


@dataclass(frozen=True)
class _Push:
    name: str
    snapshot: Path
    send: Callable[[], str]


class Pushes:
    """The pushes of one training run, in the place of transformers' `PushInProgress`."""

    def __init__(self, output_dir: str) -> None:
        self._output_dir = Path(output_dir)
        self._thread = ThreadPoolExecutor(1, "push-to-hub")
        self._running: list[Future[None]] = []
        self._begun = 0
        self._failed: _Push | None = None
        self._cause = ""
        #: what the Hub has of this training, in words
        self._arrived = "nothing of this training"
        for left in self._output_dir.glob(f"{_SNAPSHOT}*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)

    def start(self, folder: str, to: Destination, facts: Facts, message: str, keep_as: str | None) -> None:
        """Push the model in the checkpoint `folder`, and the checkpoint itself as the folder `keep_as` of the repository."""
        self._begun += 1
        name = Path(folder).name
        snapshot = self._output_dir / f"{_SNAPSHOT}{self._begun}-{name}"
        _link(Path(folder), snapshot)
        push = _Push(name, snapshot, lambda: push_checkpoint(snapshot, to, facts, message, keep_as))
        self._running = [each for each in self._running if not each.done()]
        self._running.append(self._thread.submit(self._attempt, push, to.repo_id))

    def _attempt(self, push: _Push, repo_id: str) -> None:
        before, self._failed = self._failed, None
        try:
            push.send()
            self._arrived = push.name
        except Exception as error:  # in a thread: told here, raised at the end of training
            self._failed, self._cause = push, redaction.redact(str(error) or type(error).__name__)
            logger.warning("%s was not pushed to %s, which has %s: %s", push.name, repo_id, self._arrived, self._cause)
        for done in (before, push):
            if done is not None and done is not self._failed:
                shutil.rmtree(done.snapshot, ignore_errors=True)

    def is_done(self) -> bool:
        return all(each.done() for each in self._running)

    def wait_until_done(self) -> None:
        for each in self._running:
            each.result()

    def retry(self, repo_id: str) -> str | None:
        """Wait for what is under way, and try the newest push once more if it failed. Returns why it failed again, `None` if all is well."""
        self.wait_until_done()
        if (push := self._failed) is None:
            return None
        logger.info("Pushing %s to %s once more.", push.name, repo_id)
        self._attempt(push, repo_id)
        if self._failed is None:
            return None
        shutil.rmtree(push.snapshot, ignore_errors=True)
        self._failed = None
        return f"{push.name} was not pushed to {repo_id}, which has {self._arrived}: {self._cause}"


def push_checkpoint(folder: Path, to: Destination, facts: Facts, message: str, keep_as: str | None) -> str:
    """Upload a sealed checkpoint: its model as the repository's, with a card, and all that a resumed run reads as the folder `keep_as`."""
    further: Content = {}
    if keep_as is not None:
        changed = hub.adapter_config(folder, to.base_model) if to.adapter else {}
        further = outgoing.checkpoint_files(folder, keep_as, changed)
    exported = folder.with_name(f"{folder.name}-adapter")
    named: dict[str, Any] = {"base_model": to.base_model} if to.adapter else {}
    try:
        if to.adapter:
            export.copy_adapter(folder, exported, lambda partial, record: cards.write(partial, facts, record))
        return (hub.push_folder if to.adapter else hub.push_model)(
            exported if to.adapter else folder,
            to.repo_id,
            facts=facts,
            private=to.private,
            token=to.token,
            revision=to.revision,
            message=message,
            force=True,  # the repository is this run's
            further=further,
            notify=lambda text: logger.info("%s", text),
            **named,
        )
    finally:
        shutil.rmtree(exported, ignore_errors=True)


def ended(why: str, folder: str, to: Destination) -> HubError:
    """The error that ends a training whose last push failed."""
    return HubError(f"The training has ended and is saved in {folder}, but {why} Publish it with: {to.command(folder)}")


def unpublished(error: HubError, folder: str, to: Destination) -> HubError:
    """The error of a push by the trainer, with what publishes the run without it."""
    if not Path(folder, checkpoint.MANIFEST_NAME).is_file():
        return error
    return HubError(f"{error} What is saved in {folder} is published, without training again, by: {to.command(folder)}")


def _link(folder: Path, snapshot: Path) -> None:
    """The files of `folder`, which may be removed meanwhile but do not change."""

    def link(source: str, target: str) -> str:
        try:
            os.link(source, target)
        except OSError:  # a file system without links
            shutil.copyfile(source, target)
        return target

    shutil.rmtree(snapshot, ignore_errors=True)
    shutil.copytree(folder, snapshot, copy_function=link)
