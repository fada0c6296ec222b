"""Show a run a GPU of `CARD_GIB` GiB on a larger one, and write its peak memory to `PEAK_FILE` five times a second.

common.py puts a copy named sitecustomize.py on the path of a run; it acts in the training process only.
"""

import os
import sys

SCRIPT = next((word for word in sys.orig_argv[1:] if not word.startswith("-")), "")
if os.environ.get("CARD_GIB") and SCRIPT.endswith("grpo_gsm8k.py"):
    import threading
    import time

    import pynvml
    import torch

    pynvml.nvmlInit()
    CARD = int(float(os.environ["CARD_GIB"]) * 2**30)
    HANDLE = pynvml.nvmlDeviceGetHandleByIndex(int(os.environ["CUDA_VISIBLE_DEVICES"]))
    REAL = torch.cuda.mem_get_info
    PEAK = [0]

    def own() -> int:
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(HANDLE):
            if process.pid == os.getpid():
                PEAK[0] = max(PEAK[0], process.usedGpuMemory or 0)
                return process.usedGpuMemory or 0
        return 0

    def card_of_that_size(device=None):
        REAL(device)
        return max(0, CARD - own()), CARD

    def watch() -> None:
        while True:
            own()
            with open(os.environ["PEAK_FILE"] + ".new", "w") as file:
                file.write(str(PEAK[0]))
            os.replace(file.name, os.environ["PEAK_FILE"])
            time.sleep(0.2)

    torch.cuda.set_per_process_memory_fraction(min(1.0, CARD / REAL()[1]))
    torch.cuda.mem_get_info = torch.cuda.memory.mem_get_info = card_of_that_size
    threading.Thread(target=watch, daemon=True).start()
