# Two commands do everything: `make serve` and `make test`. The first use of either sets up .venv.
TARGET ?= models/tiny-qwen3-code
DRAFT ?= models/tiny-qwen3-code-dflash
ARGS ?=
WORKERS ?= 2
# Any Python from 3.11 on; override with `make PYTHON=...`.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: serve test test-fast test-core lint bench clean

serve: $(READY)
	$(BIN)/python -m sglang.launch_server --model-path $(TARGET) --speculative-algorithm DFLASH --speculative-draft-model-path $(DRAFT) $(ARGS)

# Two workers, each with servers of its own and one PyTorch thread; a file stays with one worker.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# The inner loop: tests that need no server.
test-fast: $(READY)
	@$(MAKE) --no-print-directory test ARGS='-m "not server and not long and not rehearsal_full" $(ARGS)'

# Tests that need no SGLang: its import is blocked, and a test that tries it is skipped. Under a minute on two cores.
test-core: $(READY)
	@$(MAKE) --no-print-directory test ARGS='--core $(ARGS)'

# Formatter, linter, docstrings, imports, dependencies, types. mypy wants the package under its installed name.
lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python .ci/check_docstrings.py python
	@! grep -rnE '(from|import) test_' test/srt --include='*.py' || { echo "Move what tests share to test/srt/support/."; exit 1; }
	$(BIN)/lint-imports
	$(BIN)/deptry python
	$(BIN)/deptry benchmark benchmark/tiny examples test/srt --ignore DEP002,DEP004
	@mkdir -p build/types && ln -sfn ../../python/sglang build/types/sglang_dflash
	$(BIN)/mypy -p sglang_dflash

bench: $(READY)
	$(BIN)/python benchmark/bench.py $(ARGS)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "sglang-dflash needs Python 3.11 or newer; give one with make PYTHON=..."; exit 1; }
	@test -d $(VENV) || echo "Setting up $(VENV): SGLang and its dependencies, about 9 GB, a few minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test,bench,lint]'
	@touch $@

clean:
	rm -rf $(VENV)
