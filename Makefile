# Two commands for a newcomer: `make demo` and `make test`. Both make .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out

.PHONY: setup demo test test-all lint types format clean

setup: $(VENV)/ready

$(VENV)/ready: requirements/cpu.lock requirements/setup.sh pyproject.toml
	bash requirements/setup.sh $(PYTHON) $(VENV)
	@touch $@

demo: setup
	$(BIN)/python -m ray_jobs.demo recipes/smollm2.yaml dataset.uri=$(OUT)/smollm2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -m "not slow" --durations=15

test-all: lint types
	$(BIN)/pytest --durations=30

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(OUT) .pytest_cache .mypy_cache .ruff_cache
