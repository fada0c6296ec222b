"""The trainer's way out: exports, pushes and cards as methods, with the promises of `qerl_trl.publish`.

It stands outside that wing because every trainer carries it and few runs need it at once: `publish` is imported when a method is called.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accelerate.utils import broadcast_object_list
from peft import PeftModel
from torch import nn
from transformers.trainer_utils import HubStrategy, SaveStrategy, TrainOutput

from ..checkpoint import settings
from ..rollout.sampling import save_generation_config
from ..support import secrets
from ..support.trl import OnlineTrainer

if TYPE_CHECKING:
    from ..checkpoint.records import Export, Facts
    from .hub import Destination

logger = logging.getLogger(__name__)


def warn_of_exports(model: nn.Module, processing_class: Any) -> None:
    """Plan the export of a merged model now, tensor by tensor, without computing or writing any: what this model's form does not allow is said
    before anything is trained, with the reason that the export would give at the end."""
    from .load import TrainedPolicy
    from .merge import entries_of

    if not isinstance(model, PeftModel):
        return
    settings.warn_of_tokens(model, processing_class)
    try:
        entries_of(TrainedPolicy(model, None, {}), with_adapter=True)
    except (ValueError, RuntimeError) as error:
        logger.warning("This run's adapter can be saved and published. Its merge into the base cannot: %s", error)


class PublishingMixin(OnlineTrainer):
    """`save_adapter`, `save_merged`, `save_base`, and `push_to_hub()` in the parent's place, also for `hub_strategy` while training.

    Private unless said otherwise, whole or not at all, with our card, and only the files that `publish.outgoing` lets out. To be mixed in
    before TRL's trainer, none of whose own uploads is left.
    """

    #: why the Hub does not have the newest checkpoint of this training
    _not_pushed: str | None = None

    if TYPE_CHECKING:  # `SavingMixin.save_model`

        def save_model(
            self, output_dir: str | None = None, _internal_call: bool = False, push: bool = True
        ) -> None: ...

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """With generation_config.json, for an adapter too: it has the end tokens of the run."""
        super()._save(output_dir, state_dict)
        model = self.accelerator.unwrap_model(self.model)
        save_generation_config(output_dir or cast(str, self.args.output_dir), model, self.processing_class)

    def save_adapter(self, folder: str | os.PathLike, **options: Any) -> "Export":
        """See [`export.save_adapter`]. Call it, and the two below, in all processes; the main one writes."""
        from . import export

        return export.save_adapter(self, folder, card=self._write_card, **options)

    def save_merged(self, folder: str | os.PathLike, **options: Any) -> "Export":
        """See [`export.save_merged`]."""
        from . import export

        return export.save_merged(self, folder, card=self._write_card, **options)

    def save_base(self, folder: str | os.PathLike, **options: Any) -> "Export":
        """See [`export.save_base`]."""
        from . import export

        return export.save_base(self, folder, card=self._write_card, **options)

    def _write_card(self, folder: Path, export: "Export") -> None:
        from . import card

        card.write(folder, card.facts_of(self), export)

    def _warn_of_checkpoints(self) -> None:
        """Under DeepSpeed, of what a resumed run would read, the optimizer's state is not sent with a checkpoint."""
        if self.is_deepspeed_enabled and self.args.hub_strategy in (
            HubStrategy.CHECKPOINT,
            HubStrategy.ALL_CHECKPOINTS,
        ):
            logger.warning(
                "hub_strategy=%r under DeepSpeed does not push the optimizer's state, so a run resumes from %s only.",
                HubStrategy(self.args.hub_strategy).value,
                self.args.output_dir,
            )

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        if not self.is_world_process_zero():
            return
        from . import hub

        secrets.check_places(
            {"processing_class": self.processing_class}
        )  # also one that was not given, but found with the model
        self._warn_of_checkpoints()
        private = self._is_private(private)
        if isinstance(self.accelerator.unwrap_model(self.model), PeftModel) and self.args.hub_base_model is None:
            hub.require_hub_base(self.model.config._name_or_path)  # now, not when it is trained
        self.hub_model_id = hub.prepare_repository(
            self._repo_name(), private, token or self.args.hub_token, self.args.hub_revision
        )

    def _output_dir(self) -> str:
        assert self.args.output_dir is not None  # TrainingArguments replaces None
        return self.args.output_dir

    def _is_private(self, wanted: bool | None = None) -> bool:
        """As the call says, else as the arguments do: private but for an explicit False."""
        return (self.args.hub_private_repo if wanted is None else wanted) is not False

    def _repo_name(self) -> str:
        return self.args.hub_model_id or Path(self._output_dir()).absolute().name

    def create_model_card(  # type: ignore[override]  # TRL's signature, which differs from transformers'
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        if not self.is_world_process_zero():
            return
        from . import card

        facts = self._facts(model_name, dataset_name, tags)
        if self.hub_model_id is not None:
            facts["repo_id"] = self.hub_model_id
        Path(self._output_dir(), "README.md").write_text(secrets.redact(card.render(facts)))

    def _facts(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **others: Any,  # of transformers' card, which ours has no place for
    ) -> "Facts":
        from . import card

        facts = card.facts_of(self, dataset=dataset_name)
        facts["extra_tags"] = [tags] if isinstance(tags, str) else sorted(tags or ())
        if model_name:
            facts["title"] = model_name
        return facts

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
        """Publish the adapter, or the model where every weight was trained, with its card. Returns the URL of the commit, `None` on other
        ranks. See `Trainer.push_to_hub` for the arguments they share.

        Args:
            private (`bool`, *optional*):
                Default: `hub_private_repo` of the arguments, which is private but for an explicit `False`.
            base_model (`str`, *optional*):
                Hub id of the base, where the run trained on a local folder. Default: `hub_base_model` of the arguments.
        """
        from . import hub

        to = self._destination(base_model, token, revision, private)
        if to.adapter and to.base_model is None:
            hub.require_hub_base(self.model.config._name_or_path)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        options: dict[str, Any] = {
            "facts": self._facts(**kwargs),
            "private": to.private,
            "token": to.token,
            "revision": to.revision,
            "message": commit_message,
            "force": self.args.push_to_hub,  # the repository then contains this run's pushes during training
        }
        try:
            if to.adapter:
                url = hub.push_adapter(self, to.repo_id, to.base_model, **options)
            else:
                self.save_model(push=False)
                url = (
                    hub.push_model(self._output_dir(), to.repo_id, **options) if self.is_world_process_zero() else None
                )
        except hub.HubError as error:
            raise to.unpublished(error, self._output_dir()) from None
        if url is not None:
            self.hub_model_id = "/".join(url.split("/commit/")[0].split("/")[-2:])
        return url

    def _destination(
        self,
        base_model: str | None = None,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
    ) -> "Destination":
        from .hub import Destination

        return Destination(
            repo_id=self.hub_model_id or self._repo_name(),
            private=self._is_private(private),
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            base_model=base_model or self.args.hub_base_model,
            adapter=isinstance(self.accelerator.unwrap_model(self.model), PeftModel),
        )

    # ------------------------------------------------------------------------------------------------- while training

    def _pushes_while_training(self) -> bool:
        return self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """A push that fails is warned of at once, and raised once training has ended."""
        if not self.is_world_process_zero() or not self._pushes_while_training():
            return
        from . import hub

        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        folder, to = Path(checkpoint_folder), self._destination()
        kept = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: folder.name}
        by_steps = self.args.save_strategy == SaveStrategy.STEPS
        when = f"step {self.state.global_step}" if by_steps else f"epoch {int(self.state.epoch or 0)}"
        keep_as = kept.get(HubStrategy(self.args.hub_strategy))
        try:
            hub.push_checkpoint(folder, to, self._facts(), f"Training in progress, {when}", keep_as)
        except (hub.HubError, ValueError, OSError) as error:
            self._not_pushed = secrets.redact(f"{folder.name} was not pushed to {to.repo_id}: {error}")
            logger.warning("%s", self._not_pushed)
        else:
            self._not_pushed = None

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        # callbacks of trackers that log the model build a plain Trainer from the arguments there, which would upload the whole folder
        pushes, self.args.push_to_hub = self.args.push_to_hub, False
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.push_to_hub = pushes

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`. Raises where the last push while training failed, once everything is saved here."""
        self._not_pushed = None
        output: TrainOutput = super().train(*args, **kwargs)
        if not self._pushes_while_training():
            return output
        failed = [self._not_pushed]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(failed)
        if failed[0] is not None:
            from .hub import HubError

            self.save_model(push=False)
            folder = self._output_dir()
            raise HubError(
                f"The training has ended and is saved in {folder}, but {failed[0]} Publish it with: {self._destination().command(folder)}"
            )
        return output
