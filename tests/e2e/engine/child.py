"""The process of one file: runs pytest with the arguments that it is given (conftest.py)."""

import os
import sys

import pytest
import torch

if __name__ == "__main__":
    if not torch.cuda.is_available():
        from tests.e2e.engine.engines import register_once

        register_once()
    code = pytest.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(int(code))  # vLLM's own shutdown takes seconds and tests nothing of ours
