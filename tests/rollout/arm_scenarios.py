"""Scenarios of the arms and of the evaluation in the engine; as scenarios.py, which it uses, in a process of its own.

python arm_scenarios.py NAME FOLDER
"""

import json
import os
import time
from pathlib import Path

import scenarios
import torch
from datasets import load_dataset
from scenarios import DEVICE, MEMORY, gap, greedy, scenario

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "examples" / "assets"


def arm_trainer(folder: Path, arm: str, path: str, **settings):
    """A trainer of two steps in float32, adapter on everything where the arm has one."""
    from datasets import Dataset
    from peft import LoraConfig

    from qerl_trl import QeRLConfig, QeRLGRPOTrainer

    options = {
        "output_dir": str(folder / arm), "base_format": arm, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 16, "max_steps": 2, "learning_rate": 1e-3 if arm == "full" else 1e-2, "use_vllm": True,
        "vllm_mode": "colocate", "vllm_max_model_length": 128, "bf16": False, "report_to": [], "logging_steps": 1,
        "vllm_gpu_memory_utilization": MEMORY["gpu_memory_utilization"], "vllm_engine_kwargs": {"enforce_eager": True, **MEMORY},
        "use_cpu": DEVICE == "cpu", "save_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"}, "aqn_sigma_start": 2e-2, "aqn_sigma_end": 1e-2, "aqn_num_stages": 2,
    }  # fmt: skip
    prompts = ["the quick brown fox", "what is 1 + 2", "0 1 2 3", "lazy dog"] * 8
    keyword = {
        "reward_funcs": lambda completions, **_: [float(len(set(str(c)))) for c in completions],
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
        "peft_config": None if arm == "full" else LoraConfig(r=8, lora_alpha=24, target_modules="all-linear"),
    }
    if settings.get("eval_dataset") == "train":
        settings["eval_dataset"] = settings["train_dataset"].select(range(8))
    keyword |= {
        name: settings.pop(name) for name in tuple(settings) if name in (*keyword, "processing_class", "eval_dataset")
    }
    trainer = QeRLGRPOTrainer(model=path, args=QeRLConfig(**{**options, **settings}), **keyword)
    scenarios._ALIVE.append(trainer)
    return trainer


def is_shared(arm: str, policy, llm) -> bool:
    from qerl_trl.rollout.vllm.engine import engine_model

    mine = policy.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    theirs = engine_model(llm).model.layers[0].self_attn.qkv_proj
    mine_name, name = {"nvfp4": ("weight_packed",) * 2, "bf16": ("weight",) * 2, "nf4": ("weight", "nf4_0")}[arm]
    return getattr(mine, mine_name).data_ptr() == getattr(theirs, name).data_ptr()


def run_arm(folder: Path, arm: str, path: str) -> dict:
    from qerl_trl.rollout.vllm.engine import engine_model

    trainer = arm_trainer(folder, arm, path)
    g = trainer.vllm_generation
    before = greedy(g.engine.llm)
    # now: in a second trainer of one process accelerate's device is "cpu:0", and its prepare() copies what lies on "cpu"
    shared = arm != "full" and is_shared(arm, trainer.accelerator.unwrap_model(trainer.model), g.engine.llm)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    policy = trainer.accelerator.unwrap_model(trainer.model).eval()
    layer = engine_model(g.engine.llm).model.layers[0].self_attn.qkv_proj
    results = {
        "probe": vars(g.probe_result),
        "shared": shared,
        "method": type(layer.quant_method).__name__,
        "engine dtype": str(next(iter(engine_model(g.engine.llm).parameters())).dtype),
        "logs": [
            {
                key: log[key]
                for key in ("aqn/sigma", "aqn/sigma_effective", "sampling/sampling_logp_difference/max", "grad_norm")
            }
            for log in logs
        ],
        # the last update is not in the engine yet
        "stale": gap(policy, g.engine.llm),
    }
    # TRL casts a bitsandbytes model's adapter to bfloat16; for an exact comparison both sides compute with it in float32
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
    g.sync_weights()
    g.sync_noise()
    results["after training"] = gap(policy, g.engine.llm)
    after = greedy(g.engine.llm)
    results["moved"] = (after[1] - before[1]).abs().max().item()
    with torch.no_grad():  # by hand, and generate() must notice
        changed = [p for n, p in policy.named_parameters() if p.requires_grad and ("lora_B" in n or arm == "full")]
        for parameter in changed:
            parameter.mul_(1.3)
    results["changed by hand"] = gap(policy, g.engine.llm)
    g.generate_greedily([[1, 2, 3]], 1)
    results["generate syncs by itself"] = gap(policy, g.engine.llm)
    if arm == "full":
        g.engine.state.model.load_weights = lambda weights: {name for name, _ in weights}  # weights that land nowhere
        with torch.no_grad():
            for parameter in changed:
                parameter.mul_(1.1)
        results["lost weights"] = scenarios.error_of(g.sync_weights)
    return results


@scenario
def arms(folder: Path) -> dict:
    """Two GRPO steps in each arm, colocated, with noise on the norms in the second."""
    path = scenarios.write_model(folder)
    return {arm: run_arm(folder, arm, path) for arm in ("nvfp4", "bf16", "nf4", "full")}


def nf4_policy(path: str):
    """A bitsandbytes base in float32 with a random adapter in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=quantization)
    policy = get_peft_model(model.to(DEVICE), LoraConfig(r=6, lora_alpha=18, target_modules="all-linear"))
    scenarios.randomize(policy)
    return policy


@scenario
def compiled_arms(folder: Path) -> dict:
    """torch.compile of the whole model in the arms whose weights are not NVFP4: what was traced must read them, not remember them."""
    from transformers import AutoModelForCausalLM

    path = scenarios.write_model(folder, num_hidden_layers=1)
    engine = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": "NONE"}}
    results = {}
    for arm in ("nf4", "full"):
        policy = nf4_policy(path) if arm == "nf4" else None
        policy = policy or AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE)
        g = scenarios.stub_generation(policy, engine=engine)
        gaps = []
        for seed in range(2):
            if arm == "nf4":
                scenarios.randomize(policy, seed + 1)
            else:
                with torch.no_grad():
                    for parameter in policy.parameters():
                        parameter.mul_(1.1)
            stale = gap(policy, g.engine.llm)
            g.sync_weights()
            gaps.append((stale, gap(policy, g.engine.llm)))
        results[arm] = gaps
    return results


@scenario
def graphs_of_arms(folder: Path) -> dict:
    """On a GPU in bfloat16, with torch.compile and CUDA graphs as shipped: two steps of each arm, and the probe again afterwards."""
    path, results = scenarios.write_model(folder), {}
    for arm in ("nvfp4", "bf16", "nf4", "full"):
        dtype = {"dtype": "float32" if arm == "full" else "bfloat16"}
        trainer = arm_trainer(folder, arm, path, bf16=True, model_init_kwargs=dtype, vllm_engine_kwargs=MEMORY)
        g = trainer.vllm_generation
        before = greedy(g.engine.llm)[1]
        trainer.train()
        g.sync_weights()
        g.sync_noise()
        moved = (greedy(g.engine.llm)[1] - before).abs().mean().item()
        g.run_probe()
        log = next(log for log in trainer.state.log_history if "loss" in log)
        results[arm] = {
            "dtype": g.spec.dtype, "probe": vars(g.probe_result), "moved": moved,
            "first rollout": log["sampling/sampling_logp_difference/mean"],
        }  # fmt: skip
    return results


def embedded_trainer(folder: Path, problems: int, **settings):
    """The embedded model with an adapter that matters, and its held-out problems."""
    from transformers import AutoTokenizer

    from qerl_trl.tasks.data import with_prompts

    path = str(ASSETS / "tiny-qwen2")
    test = with_prompts(load_dataset("json", data_files=str(ASSETS / "test.jsonl"), split="train")).select(
        range(problems)
    )
    trainer = arm_trainer(
        folder, "nvfp4", path, processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"), train_dataset=test,
        vllm_max_model_length=256, max_completion_length=48, **settings,
    )  # fmt: skip
    scenarios.randomize(trainer.accelerator.unwrap_model(trainer.model), scale=0.02)
    return trainer, test


@scenario
def evaluation(folder: Path) -> dict:
    """Greedy answers of the engine against transformers': before, during and after training, with noise in the rollouts."""
    from qerl_trl.tasks.evaluation import HeldOutAccuracy, Measurement, solve
    from qerl_trl.tasks.task import Task

    trainer, test = embedded_trainer(
        folder, 24, aqn_sigma_start=0.3, aqn_sigma_end=0.2, eval_strategy="steps", eval_steps=1, eval_dataset="train",
        per_device_eval_batch_size=8, num_generations_eval=1,
    )  # fmt: skip
    g, policy = trainer.vllm_generation, trainer.accelerator.unwrap_model(trainer.model)
    measurement = Measurement(trainer, Task(), test)
    noise, generate = [], g.engine.generate

    def watched(prompts, sampling):
        noise.append((g.engine.state.sigma_effective(), sampling.temperature))
        return generate(prompts, sampling)

    g.engine.generate = watched

    def compare() -> dict:
        mine = measurement.held_out_completions()
        expected = solve(policy, trainer.processing_class, test, 48, progress=False)
        return {"equal": sum(a == b for a, b in zip(mine, expected, strict=True)), "different": len(set(mine))}

    results = {"before": compare()}
    during = []

    class Compares(HeldOutAccuracy):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            super().on_evaluate(args, state, control, metrics=metrics, **kwargs)
            during.append({**compare(), "metric": metrics["eval_held_out_accuracy"]})

    trainer.add_callback(Compares(measurement))
    trainer.train()
    history = trainer.state.log_history
    results |= {
        "during": during,
        "after": compare(),
        "noise while answering": noise,
        "sigma": [log["aqn/sigma_effective"] for log in history if "loss" in log],
        "logged": [log["eval_held_out_accuracy"] for log in history if "eval_held_out_accuracy" in log],
        "asleep": g.engine.asleep,
    }
    trainer.args.rollout_timeout = 1e-3
    results["hanging"] = scenarios.error_of(measurement.held_out_completions)
    return results


@scenario
def evaluation_of_two(folder: Path) -> dict:
    """Two processes with an engine each and five problems (under torchrun)."""
    from qerl_trl.tasks.evaluation import Measurement, solve
    from qerl_trl.tasks.task import Task

    trainer, test = embedded_trainer(folder, 5)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    expected = solve(policy, trainer.processing_class, test, 48, progress=False)
    return {
        "answers": Measurement(trainer, Task(), test).held_out_completions(),
        "expected": expected,
        "processes": trainer.accelerator.num_processes,
    }


@scenario
def recipe(folder: Path) -> dict:
    """A shipped recipe with its rollouts in vLLM; then an adapter of that run as it is published, in vLLM's own LoRA slots."""
    import runpy
    import sys

    sys.path.insert(0, str(ROOT))  # for `tests`; the folder of this file would hide vLLM
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    from qerl_trl.publish.export import save_adapter
    from qerl_trl.publish.load import load_policy
    from tests.test_recipes import EXAMPLES, INSTEAD, words, write_tiny_model

    run, adapter, dense = (folder / name for name in ("run", "adapter", "dense"))
    # vLLM's attention on a CPU has no heads of 16; greedy tokens have to depend on the weights
    larger = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.2}
    instead = INSTEAD | {
        "model_name_or_path": write_tiny_model("qwen2.5-3b", folder / "model", **larger),
        "output_dir": str(run),
        "vllm_engine_kwargs": json.dumps({"enforce_eager": True, **MEMORY}),
        "use_vllm": "true",
        "use_cpu": str(DEVICE == "cpu").lower(),
    }
    runpy.run_path(str(EXAMPLES / "grpo_gsm8k.py"))["main"](["--config", "qwen2.5-3b", *words(instead)])
    results = json.loads((run / "results.json").read_text())

    trained = load_policy(run, dtype="float32")
    scenarios.randomize(trained.model)  # two steps change too little to tell an adapter from none
    save_adapter(trained, adapter)
    trained.model.unload().dequantize().save_pretrained(dense)
    expected = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).to(DEVICE)
    expected = PeftModel.from_pretrained(expected, str(adapter)).eval()
    llm = scenarios.engine(str(dense), tokenizer=str(folder / "model"), enable_lora=True, max_lora_rank=32)
    request = LoRARequest("adapter", 1, str(adapter))
    tokens, _ = greedy(llm, request)
    return {
        "steps": [entry for entry in results["log_history"] if "loss" in entry],
        "settings": results["settings"],
        "quantization": str(llm.llm_engine.vllm_config.model_config.quantization),
        "adapter": gap(expected, llm, request),
        "no adapter": gap(expected, llm),
        "greedy": tokens,
        "greedy in transformers": scenarios.transformers_greedy(expected),
    }


@scenario
def recipe_sharded(folder: Path) -> dict:
    """A shipped recipe in two processes that FSDP 2 shares the trainer out between, an engine in each (under torchrun)."""
    import runpy
    import sys

    sys.path.insert(0, str(ROOT))
    from tests.test_recipes import EXAMPLES, INSTEAD, words, write_tiny_model
    from tests.test_sharded import FSDP, as_accelerators

    rank, run, model = int(os.environ["RANK"]), folder / "run", folder / "model"
    if rank == 0:
        write_tiny_model("qwen2.5-3b", folder / "begun", hidden_size=128, head_dim=32)
        (folder / "begun").rename(model)
    while not model.exists():
        time.sleep(0.1)
    os.environ |= FSDP
    as_accelerators()
    instead = {name: value for name, value in INSTEAD.items() if name != "optim"} | {
        "model_name_or_path": str(model),
        "output_dir": str(run),
        "vllm_engine_kwargs": json.dumps({"enforce_eager": True, **MEMORY}),
        "use_vllm": "true",
        "use_cpu": str(DEVICE == "cpu").lower(),
        "eval_problems": "3",
    }
    main = runpy.run_path(str(EXAMPLES / "grpo_gsm8k.py"))["main"]
    main(["--config", "qwen2.5-3b", *words(instead)])
    return json.loads((run / "results.json").read_text()) if rank == 0 else {}


if __name__ == "__main__":
    scenarios.main()
