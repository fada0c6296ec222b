# /// script
# requires-python = ">=3.11"
# dependencies = ["qerl-trl[math,track] @ git+https://github.com/qerl-trl/qerl-trl"]
# ///
"""GRPO on GSM8K, or any other task, with a 4-bit base, LoRA and adaptive quantization noise.

    accelerate launch examples/grpo_gsm8k.py                                # the default below
    accelerate launch examples/grpo_gsm8k.py --config examples/configs/qwen2.5-7b.yaml
    accelerate launch examples/grpo_gsm8k.py --task my_task.yaml            # another task: docs/source/your_task.md
    accelerate launch examples/grpo_gsm8k.py --base_format bf16 --aqn false --output_dir runs/bf16    # a control arm
    qerl-trl arms qwen2.5-7b --arms nvfp4 bf16 --seeds 1 2 3 --output_dir runs/arms    # arms x seeds, paired table

Default: Qwen2.5-3B-Instruct on openai/gsm8k with a GPU; without one, the embedded tiny model, trained from scratch by
`examples/assets/pretrain.py`, on generated problems in GSM8K's format. Another --model_name_or_path without a GPU uses
no recipe, only the defaults of TRL and `QeRLConfig`. All options of `QeRLConfig` and TRL's `ModelConfig` are accepted.
With the same output_dir, a run resumes from its last complete checkpoint; a finished run is only evaluated again.
"""

from collections.abc import Sequence

from qerl_trl import QeRLGRPOTrainer, Script


def main(argv: Sequence[str] | None = None) -> None:
    script = Script.parse(argv=argv)  # task, QeRLConfig and ModelConfig, from --config, --task and options
    trainer = QeRLGRPOTrainer(**script.trainer_arguments())
    script.train(trainer)  # evaluate, train, evaluate; writes results.json


if __name__ == "__main__":
    main()
