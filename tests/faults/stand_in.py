"""An engine over a copy of the trainer's own model: what vLLM would do, and a place to inject faults."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from qerl_trl.noise.generator import standard_noise
from qerl_trl.rollout.engine import Completion, Contents, Engine, bits, update_fingerprint
from qerl_trl.rollout.generation import QeRLVLLMGeneration
from qerl_trl.rollout.spec import EngineSpec, active_adapter, linear_layers, rollout_layers
from qerl_trl.support.names import canonical_name
from tests.faults.tiny_runs import PROMPTS, TinyRuns


@torch.no_grad()
def greedy(policy: nn.Module, prompts: list[list[int]], max_tokens: int) -> list[Completion]:
    """Greedy completions of prompts of one length, token by token with a cache."""
    tokens, logps, past, ids = [], [], None, torch.tensor(prompts)
    for _ in range(max_tokens):
        output = policy(input_ids=ids, past_key_values=past, use_cache=True)
        past = output.past_key_values
        best = output.logits[:, -1].float().log_softmax(-1).max(-1)
        tokens.append(best.indices)
        logps.append(best.values)
        ids = best.indices[:, None]
    rows = zip(torch.stack(tokens, 1).tolist(), torch.stack(logps, 1).tolist(), strict=True)
    return [Completion(*row) for row in rows]


class StandIn(Engine):
    """Generates with a copy of `policy`, changed by `base_fault`: norms in float32, adapter in the model's dtype."""

    def __init__(self, policy: nn.Module, base_fault=None) -> None:
        self.policy = copy.deepcopy(policy).eval().requires_grad_(False)
        for module in self.policy.modules():
            vars(module).pop("forward", None)  # TRL's own, which computes with the trainer's model in a copy too
        self.norms = {}
        for name, module in self.policy.named_modules():
            weight = module._parameters.get("weight")
            if "norm" in name and weight is not None and weight.ndim == 1:
                module.float()
                module.register_forward_hook(lambda module, args, output: output.to(args[0].dtype))
                self.norms[canonical_name(name)] = module
        if base_fault is not None:
            base_fault(self.policy.get_base_model())
        self.clean = {name: norm.weight.detach().clone() for name, norm in self.norms.items()}
        self.draw = self.sampled = self.received = None
        self.bits = self._bits()
        layer = next(iter(linear_layers(self.policy).values()))
        self.dtype = getattr(layer, "compute_dtype", layer.weight.dtype)
        self.generator = torch.Generator().manual_seed(0)
        self.calls: list[str] = []
        self.top_p = 1.0
        self.llm = SimpleNamespace(generate=self._llm_generate)

    @torch.no_grad()
    def put_adapter(self, adapter, norms):
        self.calls.append("put_adapter")
        own, name_of = rollout_layers(self.policy), active_adapter(self.policy)
        for name, layer in own.items():
            a, b = layer.lora_A[name_of].weight, layer.lora_B[name_of].weight
            if name not in adapter:
                b.zero_()
                continue
            tensors, dtype = adapter[name], self.dtype
            a.copy_(tensors.a.to(dtype))
            b.copy_((tensors.b * tensors.scaling).to(dtype) / layer.scaling[name_of])
        self.clean |= {name: weight.detach().float().clone() for name, weight in norms.items()}
        self.received = update_fingerprint(adapter, norms)
        self.bits |= {name: value for name, value in self._bits().items() if ".lora_" in name}

    def _bits(self) -> dict[str, int]:
        return {name: int(bits(p)) for name, p in self.policy.named_parameters() if "norm" not in name}

    @torch.no_grad()
    def set_noise(self, norms, draw):
        self.calls.append(f"set_noise {draw.sigma:g}")
        added = []
        for name in norms:
            z = draw.sigma * standard_noise(draw.seed, draw.step, draw.generation, name, self.clean[name].numel())
            self.norms[name].weight.copy_(self.clean[name] + z)
            added.append((self.norms[name].weight - self.clean[name]).flatten())
        self.draw = draw
        return float(torch.cat(added).square().mean().sqrt())

    def contents(self):
        damaged = [name for name, found in self._bits().items() if found != self.bits[name]]
        return Contents(self.received, damaged, self.draw)

    def reset_prefix_cache(self): ...

    def sleep(self):
        self.calls.append("sleep")

    def wake(self):
        self.calls.append("wake")

    def trl_attributes(self):
        return {"llm": self.llm}

    def close(self): ...

    def generate(self, prompts, sampling):
        self.top_p = sampling.top_p
        if not sampling.temperature and len({len(prompt) for prompt in prompts}) == 1:
            self.sampled = self.draw
            return greedy(self.policy, prompts, sampling.max_tokens)
        return [self._complete(prompt, sampling.max_tokens, sampling.temperature) for prompt in prompts]

    def _llm_generate(self, prompts, sampling_params, use_tqdm=False):
        """vLLM's `LLM.generate`, as far as TRL uses it."""
        outputs = []
        for number, prompt in enumerate(prompts):
            ids = prompt["prompt_token_ids"]
            parameters = sampling_params[number] if isinstance(sampling_params, list) else sampling_params
            self.top_p = parameters.top_p
            generator = self.generator if parameters.seed is None else torch.Generator().manual_seed(parameters.seed)
            tokens, logps = self._complete(ids, parameters.max_tokens, parameters.temperature, generator)
            if parameters.logprobs:  # as our `SharedLLM`, of more tokens than the sampled one
                top = torch.stack(self.rows).topk(parameters.logprobs)
                self.llm.top = [*(self.llm.top if outputs else []), (top.indices, top.values)]
            steps = [{t: SimpleNamespace(logprob=p, rank=1)} for t, p in zip(tokens, logps, strict=True)]
            completion = SimpleNamespace(token_ids=tokens, logprobs=steps)
            outputs.append(SimpleNamespace(prompt_token_ids=ids, outputs=[completion]))
        return outputs

    @torch.no_grad()
    def _complete(self, prompt, max_tokens, temperature, generator=None) -> Completion:
        self.sampled = self.draw
        tokens, logps, past, self.rows = [], [], None, []
        ids = torch.tensor([list(prompt)])
        for _ in range(max_tokens):
            output = self.policy(input_ids=ids, past_key_values=past, use_cache=True)
            past = output.past_key_values
            row = (output.logits[0, -1].float() / (temperature or 1.0)).log_softmax(-1)
            if self.top_p < 1 and temperature:
                likely, order = row.sort(descending=True)
                left_out = order[likely.exp().cumsum(0) - likely.exp() >= self.top_p]
                row = row.index_fill(0, left_out, -torch.inf).log_softmax(-1)  # logprobs_mode="processed_logprobs"
            drawn = torch.multinomial(row.exp(), 1, generator=generator or self.generator)
            token = int(drawn if temperature else row.argmax())
            tokens.append(token)
            self.rows.append(row)
            logps.append(float(row[token]))
            ids = torch.tensor([[token]])
        return Completion(tokens, logps)


LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def trainers(model: Any, tokenizer: Any, folder: Any, monkeypatch: Any) -> Any:
    """`make(...)`: a GRPO trainer on bf16 NVFP4 weights whose vLLM is the stand-in; noise from the second step on."""

    def make(rollout_func=None, peft_config=LORA, engine=StandIn, **options):
        def build(self):
            self.spec = EngineSpec.of(self.model, scale_rule="rtn", dtype=self._compute_dtype())
            return engine(self.model)

        monkeypatch.setattr(QeRLVLLMGeneration, "_build_engine", build)
        given = {"rollout_func": rollout_func, "eval_dataset": PROMPTS if "eval_strategy" in options else None}
        defaults = {"save_strategy": "no", "learning_rate": 1e-5, "model_init_kwargs": None}
        defaults |= {"use_vllm": True, "vllm_mode": "colocate"}
        return TinyRuns(model, tokenizer).trainer(folder, peft_config=peft_config, given=given, **defaults | options)

    return make
