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

from . import redaction, tokenizer_identity
from .sampling import save_generation_config
from .upstream import OnlineTrainer

if TYPE_CHECKING:
    from .publish.records import Export, Facts
    from .publish.while_training import Destination, Pushes

logger = logging.getLogger(__name__)


def close_other_ways(model: nn.Module, processing_class: Any) -> None:
    """Refuse `push_to_hub` of what a trainer holds itself, its model and its tokenizer or processor: that would be public, and past everything
    that is checked here. Of these objects, not of their classes."""
    held = [model, model.get_base_model() if isinstance(model, PeftModel) else model]
    held += [processing_class, getattr(processing_class, "tokenizer", processing_class)]
    for each in held:
        for name in ("push_to_hub", "_upload_modified_files"):  # the latter: `save_pretrained(push_to_hub=True)`
            setattr(each, name, _refuse_upload)


def _refuse_upload(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "A model or a tokenizer that a QeRL trainer holds does not upload itself: that would be public unless told otherwise, and unchecked. "
        "Nothing was uploaded. Use trainer.push_to_hub(), or qerl_trl.publish.hub.push_adapter, push_merged or push_base with the trainer: the "
        "tokenizer goes with them."
    )


def warn_of_exports(model: nn.Module, processing_class: Any) -> None:
    """Plan the export of a merged model now, tensor by tensor, without computing or writing any: what this model's form does not allow is said
    before anything is trained, with the reason that the export would give at the end."""
    from .publish.merge import entries_of
    from .publish.run import TrainedPolicy

    if not isinstance(model, PeftModel):
        return
    tokenizer_identity.warn_of_tokens(model, processing_class)
    try:
        entries_of(TrainedPolicy(model, None, {}), with_adapter=True)
    except (ValueError, RuntimeError) as error:
        logger.warning("This run's adapter can be saved and published. Its merge into the base cannot: %s", error)


class PublishingMixin(OnlineTrainer):
    """`save_adapter`, `save_merged`, `save_base`, and `push_to_hub()` in the parent's place, also for `hub_strategy` while training.

    Private unless said otherwise, whole or not at all, with our card, and only the files that `publish.outgoing` lets out. To be mixed in
    before TRL's trainer, none of whose own uploads is left.
    """

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
        from .publish import export

        return export.save_adapter(self, folder, card=self._write_card, **options)

    def save_merged(self, folder: str | os.PathLike, **options: Any) -> "Export":
        """See [`export.save_merged`]."""
        from .publish import export

        return export.save_merged(self, folder, card=self._write_card, **options)

    def save_base(self, folder: str | os.PathLike, **options: Any) -> "Export":
        """See [`export.save_base`]."""
        from .publish import export

        return export.save_base(self, folder, card=self._write_card, **options)

    def _write_card(self, folder: Path, export: "Export") -> None:
        from .publish import cards

        cards.write(folder, cards.facts_of(self), export)

    def _warn_of_checkpoints(self) -> None:
        """Of what a resumed run would read, some is not sent with a checkpoint."""
        strategy = HubStrategy(self.args.hub_strategy)
        if strategy not in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            return
        if self.is_deepspeed_enabled:
            logger.warning(
                "hub_strategy=%r under DeepSpeed: its optimizer state stays here, so no run can go on from what is pushed, only from the checkpoints in %s.",
                strategy.value,
                self.args.output_dir,
            )

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        if not self.is_world_process_zero():
            return
        from .publish import hub, while_training

        redaction.check_places(
            {"processing_class": self.processing_class}
        )  # also one that was not given, but found with the model
        self._warn_of_checkpoints()
        private = self._is_private(private)
        if isinstance(self.accelerator.unwrap_model(self.model), PeftModel) and self.args.hub_base_model is None:
            hub.require_hub_base(self.model.config._name_or_path)  # now, not when it is trained
        api, self.hub_model_id = hub.prepare_repository(self._repo_name(), private, token or self.args.hub_token)
        hub.make_branch(api, self.hub_model_id, self.args.hub_revision)
        self.push_in_progress = while_training.Pushes(self._output_dir())

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
        from .publish import cards

        facts = self._facts(model_name, dataset_name, tags)
        if self.hub_model_id is not None:
            facts["repo_id"] = self.hub_model_id
        Path(self._output_dir(), "README.md").write_text(redaction.redact(cards.render(facts)))

    def _facts(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
        **others: Any,  # of transformers' card, which ours has no place for
    ) -> "Facts":
        from .publish import cards

        facts = cards.facts_of(self, dataset=dataset_name)
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
        from .publish import hub, while_training

        to = self._destination(base_model, token, revision, private)
        if to.adapter and to.base_model is None:
            hub.require_hub_base(self.model.config._name_or_path)
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if getattr(self, "push_in_progress", None) is not None:
            self._finish_current_push()
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
            raise while_training.unpublished(error, self._output_dir(), to) from None
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
        from .publish.while_training import Destination

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
        if not self.is_world_process_zero() or not self._pushes_while_training():
            return
        pushes = self.push_in_progress
        if not self.args.hub_always_push and not pushes.is_done():
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        kept = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: Path(checkpoint_folder).name}
        by_steps = self.args.save_strategy == SaveStrategy.STEPS
        when = f"step {self.state.global_step}" if by_steps else f"epoch {int(self.state.epoch or 0)}"
        message = f"Training in progress, {when}"
        keep_as = kept.get(HubStrategy(self.args.hub_strategy))
        pushes.start(checkpoint_folder, self._destination(), self._facts(), message, keep_as)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        # callbacks of trackers that log the model build a plain Trainer from the arguments there, which would upload the whole folder
        pushes, self.args.push_to_hub = self.args.push_to_hub, False
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.push_to_hub = pushes

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """As `Trainer.train`. Raises where the last push while training failed, once everything is saved here."""
        output: TrainOutput = super().train(*args, **kwargs)
        if not self._pushes_while_training():
            return output
        to = self._destination()
        pushes: Pushes | None = getattr(self, "push_in_progress", None)  # of the main process
        failed = [pushes.retry(to.repo_id) if pushes is not None else None]
        if self.accelerator.num_processes > 1:
            broadcast_object_list(failed)
        if failed[0] is not None:
            from .publish import while_training

            self.save_model(push=False)
            raise while_training.ended(failed[0], self._output_dir(), to)
        return output
