# /// script
# requires-python = ">=3.11"
# dependencies = ["qerl-trl[math,track] @ git+https://github.com/qerl-trl/qerl-trl"]
# ///
"""GRPO on GSM8K, or any other task, with a 4-bit base, LoRA and adaptive quantization noise.

    accelerate launch examples/grpo_gsm8k.py                                           # picks the default below
    accelerate launch examples/grpo_gsm8k.py --config examples/configs/qwen2.5-7b.yaml
    accelerate launch examples/grpo_gsm8k.py --task my_task.yaml                       # another task: see docs/source/your_task.md
    accelerate launch examples/grpo_gsm8k.py --base_format bf16 --aqn false --output_dir runs/bf16     # a control arm, in its own folder
    qerl-trl arms qwen2.5-7b --arms nvfp4 bf16 --seeds 1 2 3 --output_dir runs/arms    # arms x seeds, and the paired table

Without --config: Qwen2.5-3B-Instruct on openai/gsm8k if there is a GPU, otherwise the embedded default, a tiny model that
`examples/assets/pretrain.py` trained from scratch, on generated problems in GSM8K's format. Another --model_name_or_path without a GPU
takes no recipe: the defaults of TRL and of `QeRLConfig`. Any option of `QeRLConfig` and of TRL's `ModelConfig` may follow. Started again with the same output_dir, it resumes from the last whole checkpoint; a finished
run is measured again and no longer trained.
"""

from collections.abc import Sequence

from qerl_trl import QeRLGRPOTrainer, Script


def main(argv: Sequence[str] | None = None) -> None:
    script = Script.parse(argv=argv)  # the task, QeRLConfig and ModelConfig, from --config, --task and further options
    trainer = QeRLGRPOTrainer(**script.trainer_arguments())
    script.train(trainer)  # held-out accuracy before, training, held-out accuracy after; results.json


if __name__ == "__main__":
    main()
