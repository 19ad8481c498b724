PYTHON ?= python3
VENV ?= .venv
PYTEST ?= -q -n 2 --dist worksteal
PROMPT ?= def read_lines(path):

# What runs on a GPU at all: not the command line, files, packaging, plans and the bench's arithmetic.
GPU_TESTS = gpu fla_scan triton_states triton_decode triton_store triton_rounding separate_precisions launching \
	decode_backends replay_properties layers ops key_precision cache* cases* attention mla moe hybrid generate graphs \
	speculative long_speculation verify drafters mtp mtp_decoder

BIN = $(VENV)/bin
OLDEST = 5.17
# The oldest transformers that replayssm.hf fits, with all that it needs, in front of the environment's own.
OLDEST_PATH = $(abspath $(VENV))/transformers-$(OLDEST)
# A moved clone, changed requirements, an environment that another clone used last: each of them installs again.
STAMP = $(CURDIR) $(shell cat pyproject.toml constraints-cpu.txt | cksum)

# What the environment already holds (above all a torch its user chose) stays at its version. The rest follows
# constraints-cpu.txt, unless an NVIDIA GPU answers: pip then takes the torch that brings its own triton.
define CONSTRAINTS
import importlib.metadata, re, shutil, subprocess

smi = shutil.which("nvidia-smi")
gpu = smi is not None and b"GPU" in subprocess.run([smi, "-L"], stdout=subprocess.PIPE).stdout
for line in open("constraints-cpu.txt"):
    if name := re.match(r"[\w.-]+", line):
        try:
            print(f"{name[0]}=={importlib.metadata.version(name[0])}")
        except importlib.metadata.PackageNotFoundError:
            if not gpu:
                print(line, end="")
endef
export CONSTRAINTS

.PHONY: demo test test-oldest gpu lint install clean

demo: install
	$(BIN)/python -m replayssm generate "$(PROMPT)" --max-new-tokens 300 --temperature 0.5 --seed 0

test: install
	$(BIN)/python -m pytest $(PYTEST)

test-oldest: install
	@test -e $(OLDEST_PATH)/installed || { set -e; rm -rf $(OLDEST_PATH); \
		$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/replayssm-constraints.txt \
			--target $(OLDEST_PATH) 'transformers==$(OLDEST).*'; \
		touch $(OLDEST_PATH)/installed; }
	PYTHONPATH=$(OLDEST_PATH) $(BIN)/python -m pytest $(PYTEST) $(wildcard tests/test_hf_*.py)

# On a machine with an NVIDIA GPU, with the Python whose torch fits its driver (PYTHON=...): the tests of what runs there,
# then the times of the kernels. Nothing is installed. Four workers: the largest tests take 30 GB each.
gpu:
	REPLAYSSM_TEST_DEVICE=cuda $(PYTHON) -m pytest -q -n 4 --dist worksteal $(wildcard $(GPU_TESTS:%=tests/test_%.py))
	$(PYTHON) -m replayssm bench kernel

lint: install
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

install:
	@if [ "$$(cat $(VENV)/replayssm-installed 2>/dev/null)" != "$(STAMP)" ]; then set -e; \
		test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
		$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip; \
		$(BIN)/python -c "$$CONSTRAINTS" >$(VENV)/replayssm-constraints.txt; \
		$(BIN)/python -m pip install --disable-pip-version-check -c $(VENV)/replayssm-constraints.txt -e '.[test,dev]' || { \
			echo 'If torch and triton conflict, the index has only CUDA builds of this torch. Put a CPU build of torch'; \
			echo "into $(VENV) first (see README.md) and run make again: it keeps a torch that is there."; \
			exit 1; }; \
		echo "$(STAMP)" >$(VENV)/replayssm-installed; \
	fi

clean:
	rm -rf .venv .ci/venv build dist replayssm.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
