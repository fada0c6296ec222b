"""Architectures in vLLM: the engine's half of tests/architectures.py.

    python -m tests.e2e.engine.architectures [NAME ...]

tries all or some, each in its own process, and writes two cells and the engine's dtype into docs/architectures.json.
The tests try `REPRESENTATIVES`, or all with QERL_EXHAUSTIVE=1 (ten minutes on two cores). Rollout: the engine passes
the probe, and with an adapter its greedy log-probabilities are the trainer's. Noise: the same, after its own probe."""

import os

if __name__ == "__main__":
    from tests.e2e.engine.environment import DEFAULTS

    for key, value in DEFAULTS.items():
        os.environ.setdefault(key, value)

import importlib.util
import json
import multiprocessing
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import get_peft_model

from qerl_trl.model.lora import default_lora_config, keep_to_the_decoder, register_nvfp4_lora
from qerl_trl.noise.callback import AQNCallback
from qerl_trl.noise.hooks import NoiseDraw
from qerl_trl.nvfp4.config import NVFP4Config, from_pretrained
from qerl_trl.rollout.engine import Completion, RolloutError, Sampling
from tests import architectures
from tests.commit import commit
from tests.e2e.engine.engines import DEVICE, free_port, randomize, stub_generation
from tests.tiny_models import make_tiny_tokenizer

#: a layer fused in the checkpoint; a mapper with fused layers, and LayerNorm; a model's own norm; transformers' code
REPRESENTATIVES = ("glm4", "stablelm", "cohere2", "smollm3")
#: vLLM imports torchvision for them
PICTURES = (*architectures.VISION, "qwen3_5_text", "qwen3_next")
CELLS = {"rollout": "rollout", "rollout noise": "noise"}
PROMPTS = [[10 + i, 20, 30, 40, 50, 60 + i] for i in range(3)]
NEW = 8
DRAW = NoiseDraw(0.05, seed=7, step=3, generation=1)
#: bfloat16 only: delta nets and state spaces on a CPU; every attention on a GPU
HALF = architectures.ALL if DEVICE == "cuda" else ("qwen3_5_text", "qwen3_next", "falcon_h1")
#: packages that vLLM imports for a model, left out without them
NEEDS = dict.fromkeys(PICTURES, ("torchvision",))
NEEDS |= dict.fromkeys(("llava", "mistral3"), ("torchvision", "mistral_common"))
#: largest difference of a token's log-probability in nats, and the least effect of the noise in multiples of it
TOLERANCE = {torch.float32: (2e-3, 10), torch.bfloat16: (0.2, 2)}
SECONDS = 240


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name in HALF else torch.float32


def save_processor(name: str, tokenizer: Any, folder: Path) -> None:
    """vLLM reads a multimodal model's processor although it gets no picture."""
    if name == "qwen2_5_vl":
        made = transformers.Qwen2VLImageProcessor(), tokenizer, transformers.Qwen2VLVideoProcessor()
        transformers.Qwen2_5_VLProcessor(*made).save_pretrained(folder)
    elif name == "llava":
        images = transformers.CLIPImageProcessor(size={"shortest_edge": 28}, crop_size=28)
        transformers.LlavaProcessor(images, tokenizer, patch_size=14).save_pretrained(folder)
    elif name == "mistral3":
        images = transformers.PixtralImageProcessor(patch_size=14)
        transformers.PixtralProcessor(images, tokenizer, patch_size=14).save_pretrained(folder)


class EngineTrial:
    """One architecture in one engine. Raises `Refused` for our own refusals at the start."""

    def __init__(self, name: str, folder: Path) -> None:
        self.one = architectures.Trial(name, folder)
        self.folder = folder

    def rollout(self) -> None:
        # sharper than transformers' own initialisation: greedy tokens then depend on the weights
        architectures.dense_model(self.one.name, initializer_range=0.1).save_pretrained(self.folder / "dense")
        tokenizer = make_tiny_tokenizer()
        tokenizer.save_pretrained(self.folder / "dense")
        save_processor(self.one.name, tokenizer, self.folder / "dense")
        self.dtype = dtype_of(self.one.name)
        compute_dtype = str(self.dtype).removeprefix("torch.")
        config = NVFP4Config(modules_to_not_convert=self.one.left_out, compute_dtype=compute_dtype)
        model = from_pretrained(self.folder / "dense", config, model_class=self.one.auto, dtype=self.dtype).eval()
        model.to(DEVICE)
        lora = keep_to_the_decoder(default_lora_config(), model.config)
        self.policy = get_peft_model(model.requires_grad_(False), register_nvfp4_lora(lora)).eval()
        randomize(self.policy, scale=0.05)
        pictures = self.one.name in architectures.VISION
        engine: dict[str, Any] = {"max_num_batched_tokens": 256} | ({"language_model_only": True} if pictures else {})
        limits = {"max_model_length": 64, "max_num_seqs": 4}
        try:
            self.generation = stub_generation(self.policy, aqn=False, engine=engine, **limits)
        except (ValueError, RolloutError) as refusal:
            raise architectures.Refused(str(refusal)) from refusal
        self.generation.sync_weights()
        self.clean = self.greedy()
        assert self.gap(self.clean) < TOLERANCE[self.dtype][0], self.gap(self.clean)

    def noise(self) -> None:
        aqn = AQNCallback()
        self.generation.trainer.aqn = aqn
        try:
            aqn.attach(self.policy)
            self.generation.probe_noise()
        except (ValueError, RolloutError) as refusal:
            raise architectures.Refused(str(refusal)) from refusal
        self.generation.sync_noise(DRAW)
        noisy = self.greedy()
        with aqn.under(DRAW):
            gap = self.gap(noisy)
        moved = self.gap(noisy)
        most, times = TOLERANCE[self.dtype]
        assert gap < most and moved > times * gap, (gap, moved)
        self.generation.sync_noise(DRAW._replace(sigma=0.0))
        assert self.greedy() == self.clean

    def greedy(self) -> list[Completion]:
        return self.generation.engine.generate(PROMPTS, Sampling(NEW, ignore_eos=True))

    @torch.no_grad()
    def gap(self, completions: list[Completion]) -> float:
        """Largest difference from the trainer's log-probabilities of the same tokens."""
        ids = torch.tensor([p + c.tokens for p, c in zip(PROMPTS, completions, strict=True)], device=DEVICE)
        logits = self.policy(input_ids=ids, use_cache=False).logits[:, len(PROMPTS[0]) - 1 : -1].float()
        mine = logits.log_softmax(-1).gather(-1, ids[:, len(PROMPTS[0]) :, None]).squeeze(-1).cpu()
        return (mine - torch.tensor([c.logps for c in completions])).abs().max().item()


def _child(name: str, log: Path, pipe: Any) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["MASTER_PORT"] = str(free_port())  # TRL and other engines would take 29500
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        trial = EngineTrial(name, Path(folder))
        try:
            for cell, method in CELLS.items():
                found[cell] = architectures.attempt(getattr(trial, method))
                if found[cell] != "works":
                    break
        except Exception:
            traceback.print_exc()
            found = {"error": traceback.format_exc()[-1500:]}
    pipe.send(found)
    sys.stdout.flush()
    os._exit(0)  # an engine does not always let go of its threads


def cells(name: str, log: Path) -> dict[str, str]:
    """Cell -> "works" or "refused: ...", from a process with its output in `log`: forked, to import vLLM once, or
    spawned with a GPU. Raises `RuntimeError` for another failure."""
    context = multiprocessing.get_context("spawn" if DEVICE == "cuda" else "fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, log, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(SECONDS) else {"error": f"no answer in {SECONDS} s"}
    except EOFError:
        found = {"error": "the process died"}
    process.kill()
    process.join()
    if "error" in found:
        raise RuntimeError(f"{name}: {found['error']}\n{log.read_text()[-1500:]}")
    return found


def to_try(names: tuple[str, ...]) -> list[str]:
    """The `names` that load and have their packages here."""
    known = architectures.recorded()["architectures"]
    left_out = [name for name, needed in NEEDS.items() if not all(map(importlib.util.find_spec, needed))]
    return [name for name in names if known[name]["load"] == "works" and name not in left_out]


def main() -> None:
    import vllm
    import vllm.entrypoints.llm  # here, not once in every child

    of = commit()  # now: what is imported
    record = architectures.recorded()
    record.setdefault("rollouts", {})
    for name in to_try(tuple(sys.argv[1:]) or architectures.ALL):
        with tempfile.NamedTemporaryFile() as log:
            try:
                found = cells(name, Path(log.name))
            except RuntimeError as error:
                print(error, flush=True)
                continue
        print(name, json.dumps(found), flush=True)
        record = architectures.recorded()
        others = record["architectures"][name]
        record["architectures"][name] = {cell: others[cell] for cell in architectures.CELLS if cell in others} | found
        record["rollouts"][name] = {
            "commit": of,
            "vllm": vllm.__version__.partition("+")[0],
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "dtype": str(dtype_of(architectures.DENSE_EXPERTS.get(name, name))).removeprefix("torch."),
        }
        architectures.write(record)


if __name__ == "__main__":
    main()
