"""What TRL's generation is told on our behalf. The engine is the stand-in."""

import pytest

from tests.faults.stand_in import StandIn, make_trainer  # noqa: F401  (a fixture)


class Asked(StandIn):
    """Keeps the sampling arguments of its calls."""

    def _llm_generate(self, prompts, sampling_params, use_tqdm=False):
        self.asked = sampling_params
        return super()._llm_generate(prompts, sampling_params, use_tqdm)


@pytest.mark.parametrize(("chosen", "text"), [({"ignore_eos": True}, False), ({"stop": ["done"]}, True)], ids=str)
def test_vllm_makes_text_only_where_it_looks_for_words(make_trainer, chosen, text):  # noqa: F811
    """TRL reads tokens. For 64 sequences their text takes as long as a step of the GPU."""
    trainer = make_trainer(engine=Asked, generation_kwargs=chosen, max_steps=1)
    trainer.train()
    asked = trainer.vllm_generation.engine.asked
    assert asked.detokenize is text
    assert {name: getattr(asked, name) for name in chosen} == chosen
    assert trainer.args.generation_kwargs == chosen, "the user's settings stay as they are"
