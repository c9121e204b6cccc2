# Set-up and everyday commands. Each target sets up .venv first when it has to.
#
#   make run    BACKEND=SPEC TEXT=FILE    score a text with the demo model (without TEXT: a sample)
#   make test   ARGS="-k routing"         run the tests
#   make lint | types | wheel-check | clean

PYTHON  ?= python3
BACKEND ?=
TEXT    ?=
ARGS    ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.set-up

# Passed by environment, so that any name survives the shell.
export BACKEND TEXT

.PHONY: run test lint types wheel-check set-up clean
.DELETE_ON_ERROR:

run: $(STAMP)
	@$(BIN)/moe-core run $${BACKEND:+--backend "$$BACKEND"} $${TEXT:+--text "$$TEXT"}

# Triton reads TRITON_INTERPRET when it is imported, so its tests are a run of their own. Of two runs
# one may have nothing to do (pytest's 5) for what ARGS selects.
test: $(STAMP)
	@none=0; \
	$(BIN)/python -m pytest $(ARGS) || { test $$? -eq 5 && none=1; } && \
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -o testpaths=tests/triton $(ARGS) || \
	  { test $$? -eq 5 && test $$none -eq 0; }

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/pyright

# Builds the sdist, the wheel from it, and uses the wheel as somebody without this folder would.
wheel-check: $(STAMP)
	@.ci/wheel-check $(BIN)/python build/wheel-check

set-up: $(STAMP)

# torch goes first and alone: it is the one large download, and a failure there is easy to read.
# The build backend is installed here too, so that it is the pinned one (no build isolation).
$(STAMP): pyproject.toml constraints.txt plugins/moe-example/pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  sys.exit(None if v >= (3, 11) else f"moe-core needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Name another one: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV) (once, and again when what it depends on changes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -c constraints.txt torch
	@$(BIN)/python -m pip install -qq -c constraints.txt hatchling editables
	@$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e ".[dev]"
	@$(BIN)/python -m pip install -qq --no-index --no-deps --no-build-isolation -e plugins/moe-example
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
