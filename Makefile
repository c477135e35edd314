# What to do in a clone. Each target first sets up .venv, which takes no time when nothing has changed.
#   make train   the main job: learns the copy task from random weights   (ARGS="seed=1" overrides the recipe)
#   make test    the tests, at most 20 minutes                            (ARGS="-k name" goes to pytest)
# More: setup, test-slow (at most 35 minutes), lint, format, lock (renew the lock file), clean.

PYTHON ?= python3.11
CONFIG ?= configs/grpo_copy.yaml
ARGS ?=
BIN := .venv/bin

.PHONY: setup train test test-slow lint format lock clean

setup:
	@PYTHON="$(PYTHON)" bash requirements/setup.sh

train: setup
	$(BIN)/python -m asyncrl.train --config $(CONFIG) $(ARGS)

test: setup
	$(BIN)/python -m pytest --tier default $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest --tier slow $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:
	$(PYTHON) requirements/renew.py

clean:
	rm -rf .venv .venv.lock .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
