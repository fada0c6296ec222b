"""Compares a run's own policy with what was published of it, loaded by stock libraries. One process each.

    python real_models_reload.py reference REFERENCE.pt RUN TASK NVFP4_FOLDER     # with qerl-trl: the policy's answers
    python real_models_reload.py transformers REFERENCE.pt FOLDER                 # from here on without qerl-trl
    python real_models_reload.py vllm REFERENCE.pt FOLDER
    python real_models_reload.py peft REFERENCE.pt BASE ADAPTER                   # folders or Hub ids

Prints one JSON line. Each model scores the policy's greedy answers to the first held-out problems (`kl_nats_per_token`,
`same_greedy_token`, `mean_logp_difference`) and gives its own (`same_answers`: equal to the policy's, token for token).
"""

import argparse
import json
import os
import sys

import torch

PROBLEMS, NEW_TOKENS = 4, 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@torch.no_grad()
def scored(model, reference: dict) -> list[torch.Tensor]:
    """Logits at the tokens of each answer, (T, V)."""
    found = []
    for prompt, answer in zip(reference["prompts"], reference["answers"], strict=True):
        logits = model(torch.tensor([prompt + answer], device=model.device), use_cache=False).logits[0]
        found.append(logits[len(prompt) - 1 : -1].cpu())
    return found


@torch.no_grad()
def answered(model, prompts: list[list[int]]) -> list[list[int]]:
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def distance(policy: list[torch.Tensor], other: list[torch.Tensor], answers: list[list[int]]) -> dict[str, float]:
    a, b = (torch.cat(each).float().log_softmax(-1) for each in (policy, other))
    taken = torch.tensor([token for answer in answers for token in answer]).unsqueeze(-1)
    return {
        "kl_nats_per_token": (a.exp() * (a - b)).sum(-1).mean().item(),
        "same_greedy_token": (a.argmax(-1) == b.argmax(-1)).float().mean().item(),
        "mean_logp_difference": (a.gather(-1, taken) - b.gather(-1, taken)).abs().mean().item(),
        "tokens": len(a),
    }


def make_reference(file: str, run: str, task: str, nvfp4: str) -> dict:
    from qerl_trl.publish.load import load_any, load_policy
    from qerl_trl.support.recipes import task_file
    from qerl_trl.tasks.task import Task

    policy, own = load_policy(run, device=DEVICE), Task.read(task_file(task))
    tokenizer = own.prepared(policy.tokenizer)
    rows = own.splits()[1].select(range(PROBLEMS))
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    reference = {"texts": texts, "prompts": prompts, "answers": answered(policy.model, prompts)}
    reference["policy"] = scored(policy.model, reference)
    with policy.model.disable_adapter():
        untrained = scored(policy.model, reference)
    found = {"untrained": distance(reference["policy"], untrained, reference["answers"])}
    dtype = policy.settings["dtype"]
    del policy
    if os.path.isdir(nvfp4):  # as this package reads it: what others should read
        reference["nvfp4"] = scored(load_any(nvfp4, DEVICE, dtype).model, reference)
        found["nvfp4"] = distance(reference["policy"], reference["nvfp4"], reference["answers"])
    torch.save(reference | {"dtype": dtype}, file)
    return found


def compared(reference: dict, logits: list[torch.Tensor], answers: list[list[int]]) -> dict:
    to = {name: reference[name] for name in ("policy", "nvfp4") if name in reference}
    found: dict = {f"to_{name}": distance(each, logits, reference["answers"]) for name, each in to.items()}
    return found | {"same_answers": sum(a == b for a, b in zip(answers, reference["answers"], strict=True))}


def by_transformers(reference: dict, folder: str, adapter: str | None = None) -> dict:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

    options: dict = {"dtype": getattr(torch, reference["dtype"]), "device_map": {"": DEVICE}}
    if getattr(AutoConfig.from_pretrained(folder), "quantization_config", None) is not None:
        # as the cards say; it is decompressed to the dtype that it is stored in
        options |= {"quantization_config": CompressedTensorsConfig(dequantize=True), "dtype": "auto"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()
    tokenizer = AutoTokenizer.from_pretrained(adapter or folder)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in reference["texts"]]
    found = compared(reference, scored(model, reference), answered(model, reference["prompts"]))
    return found | {"same_tokenizer": ids == reference["prompts"]}


def by_vllm(reference: dict, folder: str) -> dict:
    """Another engine tells the log-probabilities of likely tokens: of one more token, after each beginning of an answer."""
    from vllm import LLM, SamplingParams

    own_share = {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": 2**29}  # neighbours are on this GPU
    llm = LLM(folder, dtype=reference["dtype"], enforce_eager=True, max_model_len=1024, max_num_seqs=64, **own_share)
    pairs = list(zip(reference["prompts"], reference["answers"], strict=True))
    asked = [{"prompt_token_ids": prompt} for prompt, _ in pairs]
    outputs = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS))
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    begun = [{"prompt_token_ids": prompt + answer[:at]} for prompt, answer in pairs for at in range(len(answer))]
    outputs = llm.generate(begun, SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))
    steps = [output.outputs[0].logprobs[0] for output in outputs]
    taken = [token for _, answer in pairs for token in answer]
    found: dict = {"same_answers": sum(a == b for a, (_, b) in zip(answers, pairs, strict=True))}
    for name in ("policy", "nvfp4"):
        mine = torch.cat(reference[name]).float().log_softmax(-1)
        rows = list(zip(mine, steps, taken, strict=True))
        apart = [abs(row[token].item() - step[token].logprob) for row, step, token in rows if token in step]
        same = [max(step, key=lambda each: step[each].logprob) == row.argmax().item() for row, step, _ in rows]
        found[f"to_{name}"] = {
            "mean_logp_difference": sum(apart) / len(apart),
            "same_greedy_token": sum(same) / len(same),
            "tokens": len(apart),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["reference", "transformers", "vllm", "peft"])
    parser.add_argument("reference")
    parser.add_argument("names", nargs="+")
    given = parser.parse_args()
    if given.kind == "reference":
        print(json.dumps(make_reference(given.reference, *given.names)))
        return
    reference = torch.load(given.reference)
    found = (by_vllm if given.kind == "vllm" else by_transformers)(reference, *given.names)
    assert "qerl_trl" not in sys.modules, "this is to be read without qerl-trl"
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's own end can hang


if __name__ == "__main__":
    main()
