"""vLLM's environment, which it reads at import, and the time limit of these tests."""

import os

DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "QERL_SERVER_SECRET": "shared by the servers and trainers of these tests",
    "TRITON_F32_DEFAULT": "ieee",  # vLLM's attention in float32 would round to tf32 on a GPU
}
#: try every architecture in the engine
EXHAUSTIVE = os.environ.get("QERL_EXHAUSTIVE") == "1"
#: seconds for a file; a busy machine needs more
TIMEOUT = 3600 if EXHAUSTIVE else int(os.environ.get("QERL_SCENARIO_TIMEOUT", "600"))
