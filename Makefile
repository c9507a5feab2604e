# Every target sets up what it needs; PYTHON is the interpreter to build the environment from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo serve test quality format clean

demo: $(VENV)/installed
	$(BIN)/forerun demo

serve: $(VENV)/installed-serve
	$(BIN)/forerun fetch smollm2 || true
	$(BIN)/forerun serve

test: $(VENV)/installed-dev
	$(BIN)/pytest -n auto --dist worksteal

quality: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-serve: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[serve,grammar]"
	touch $@ $(VENV)/installed

$(VENV)/installed-dev: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
