"""The trainer's exports, pushes and cards. Methods import most of `qerl_trl.publish` when called: few runs need it."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from peft import PeftModel
from torch import nn
from transformers.trainer_utils import HubStrategy, SaveStrategy, TrainOutput

from ..checkpoint.fingerprint import stored_vocabulary
from ..publish.load import TrainedPolicy
from ..publish.merge import entries_of
from ..rollout.sampling import save_generation_config
from ..support import secrets
from ..support.names import text_tokenizer
from ..support.trl import OnlineTrainer

if TYPE_CHECKING:
    from ..checkpoint.records import Export, Facts
    from ..publish.hub import Destination

logger = logging.getLogger(__name__)


def warn_of_tokens(model: Any, processing_class: Any) -> None:
    """Warn of tokens without an embedding, and of embeddings not found by stock PEFT."""
    tokens = len(text_tokenizer(processing_class))
    rows, stored = model.config.get_text_config().vocab_size, stored_vocabulary(model)
    if tokens > rows:
        what = "a text with one of the extra tokens ends in an error"
    elif stored is not None and rows not in (stored, tokens):
        what = "AutoPeftModel, which resizes to the tokenizer, cannot load the adapter (qerl_trl.load_adapter can)"
    else:
        return
    logger.warning(
        "The tokenizer has %d tokens, the model %d embeddings: %s. Call model.resize_token_embeddings(%d) before "
        "training.",
        *(tokens, rows, what, tokens),
    )


def warn_of_exports(model: nn.Module, processing_class: Any) -> None:
    """Plan a merged export without writing it, and warn before training if the model's form allows none."""
    if not isinstance(model, PeftModel):
        return
    warn_of_tokens(model, processing_class)
    try:
        entries_of(TrainedPolicy(model, None, {}), with_adapter=True)
    except (ValueError, RuntimeError) as error:
        logger.warning("This run's adapter can be saved and published. Its merge into the base cannot: %s", error)


class Uploads:
    """A trainer's uploads to the Hub, and its model cards."""

    def __init__(self, trainer: OnlineTrainer) -> None:
        self._trainer = trainer
        #: error of the newest checkpoint's push, if it failed
        self.failed: str | None = None

    def facts(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **others: Any,  # transformers' arguments, unused in our card
    ) -> "Facts":
        from ..publish import card

        facts = card.facts_of(self._trainer, dataset=dataset_name)
        facts["extra_tags"] = [tags] if isinstance(tags, str) else sorted(tags or ())
        if model_name:
            facts["title"] = model_name
        return facts

    def write_card(self, folder: Path, export: "Export") -> None:
        from ..publish import card

        card.write(folder, card.facts_of(self._trainer), export)

    def destination(
        self,
        base_model: str | None = None,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
    ) -> "Destination":
        from ..publish.hub import Destination

        trainer, args = self._trainer, self._trainer.args
        return Destination(
            repo_id=trainer.hub_model_id or args.hub_model_id or Path(args.output_dir).absolute().name,
            private=(args.hub_private_repo if private is None else private) is not False,
            token=token or args.hub_token,
            revision=revision or args.hub_revision,
            base_model=base_model or args.hub_base_model,
            adapter=isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel),
        )

    def prepare(self, token: str | None, private: bool | None) -> str:
        """Create the Hub repository before training with push_to_hub=True. Returns the repository's name."""
        from ..publish import hub

        trainer, to = self._trainer, self.destination(token=token, private=private)
        secrets.check_places({"processing_class": trainer.processing_class})  # also checks one loaded with the model
        if to.adapter and to.base_model is None:
            hub.require_hub_base(trainer.model.config._name_or_path)
        return hub.prepare_repository(to.repo_id, to.private, to.token, to.revision)

    def push(self, message: str | None, to: "Destination", **named: Any) -> str | None:
        """Publish the run's present state. Returns the commit's URL, `None` on other ranks."""
        from ..publish import hub

        trainer: Any = self._trainer
        if to.adapter and to.base_model is None:
            hub.require_hub_base(trainer.model.config._name_or_path)
        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        options: dict[str, Any] = {
            "facts": self.facts(**named),
            "private": to.private,
            "token": to.token,
            "revision": to.revision,
            "message": message,
            "force": trainer.args.push_to_hub,  # the repository then has this run's earlier pushes
        }
        url = None
        try:
            if to.adapter:
                url = hub.push_adapter(trainer, to.repo_id, to.base_model, **options)
            else:
                trainer.save_model(push=False)
                if trainer.is_world_process_zero():
                    url = hub.push_model(trainer.args.output_dir, to.repo_id, **options)
        except hub.HubError as error:
            raise to.unpublished(error, trainer.args.output_dir) from None
        return url

    def _while_training(self) -> bool:
        return self._trainer.args.push_to_hub and self._trainer.args.hub_strategy != HubStrategy.END

    def push_checkpoint(self, folder: Path) -> None:
        """Push a checkpoint during training. A failed push logs a warning now, and raises in [`end`]."""
        trainer = self._trainer
        if not trainer.is_world_process_zero() or not self._while_training():
            return
        from ..publish import hub

        trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
        to = self.destination()
        kept = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: folder.name}
        by_steps = trainer.args.save_strategy == SaveStrategy.STEPS
        when = f"step {trainer.state.global_step}" if by_steps else f"epoch {int(trainer.state.epoch or 0)}"
        keep_as = kept.get(HubStrategy(trainer.args.hub_strategy))
        self.failed = None
        try:
            hub.push_checkpoint(folder, to, self.facts(), f"Training in progress, {when}", keep_as)
        except (hub.HubError, ValueError, OSError) as error:
            self.failed = secrets.redact(f"{folder.name} was not pushed to {to.repo_id}: {error}")
            logger.warning("%s", self.failed)

    def end(self) -> None:
        """Save the model and raise `HubError` if the last push during training failed. Collective."""
        trainer: Any = self._trainer
        if not self._while_training():
            return
        failed = [self.failed]
        if trainer.accelerator.num_processes > 1:
            broadcast_object_list(failed)
        if failed[0] is not None:
            from ..publish.hub import HubError

            trainer.save_model(push=False)
            folder = trainer.args.output_dir
            raise HubError(
                f"The training has ended and is saved in {folder}, but {failed[0]} Publish it with: "
                f"{self.destination().command(folder)}"
            )


class PublishingMixin(OnlineTrainer):
    """Adds `save_adapter`, `save_merged` and `save_base` to TRL's trainer, and replaces all of its uploads.

    Uploads are private by default, complete or absent, with our card, and only of files allowed by `publish.outgoing`.
    """

    _uploads: Uploads

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save generation_config.json too, also with an adapter: it has the run's end tokens."""
        super()._save(output_dir, state_dict)
        model = self.accelerator.unwrap_model(self.model)
        save_generation_config(output_dir or self.args.output_dir, model, self.processing_class)

    def save_adapter(self, folder: str | os.PathLike, **options: Any) -> "Export":
        """See [`export.save_adapter`]. Call it, and the two below, in all processes; the main one writes."""
        from ..publish import export

        return export.save_adapter(self, folder, card=self._uploads.write_card, **options)

    def save_merged(self, folder: str | os.PathLike, **options: Any) -> "Export":
        """See [`export.save_merged`]."""
        from ..publish import export

        return export.save_merged(self, folder, card=self._uploads.write_card, **options)

    def save_base(self, folder: str | os.PathLike, **options: Any) -> "Export":
        """See [`export.save_base`]."""
        from ..publish import export

        return export.save_base(self, folder, card=self._uploads.write_card, **options)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        if self.is_world_process_zero():
            self.hub_model_id = self._uploads.prepare(token, private)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if not self.is_world_process_zero():
            return
        from ..publish import card

        facts = self._uploads.facts(*args, **kwargs)
        if self.hub_model_id is not None:
            facts["repo_id"] = self.hub_model_id
        Path(self.args.output_dir, "README.md").write_text(secrets.redact(card.render(facts)))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        base_model: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Publish the adapter, or the fully trained model, with its card. Returns the URL of the commit, `None` on
        other ranks. See `Trainer.push_to_hub` for the shared arguments.

        Args:
            private (`bool`, *optional*):
                Default: `hub_private_repo` of the arguments, private except for an explicit `False`.
            base_model (`str`, *optional*):
                Hub id of the base, if trained from a local folder. Default: `hub_base_model` of the arguments.
        """
        to = self._uploads.destination(base_model, token, revision, private)
        url = self._uploads.push(commit_message, to, **kwargs)
        if url is not None:
            self.hub_model_id = "/".join(url.split("/commit/")[0].split("/")[-2:])
        return url

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._uploads.push_checkpoint(Path(checkpoint_folder))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        # trackers that log the model build a plain Trainer from these arguments, and it would upload the whole folder
        pushes, self.args.push_to_hub = self.args.push_to_hub, False
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.push_to_hub = pushes
