# `make quickstart` and `make test` do everything from an empty machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# where this variable is set, each process of the tests compiles the sources again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart quickstart-diffusion test short-tests test-full lint style types format size docs wheel clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Isotype with every extra the tests need into $(VENV) (a few minutes the first time)"
	@# the CPU build of torch first, pinned, so that nothing after it takes a larger one
	@$(BIN)/pip install -q --constraint constraints.txt torch 2> $(VENV)/pip.log || { cat $(VENV)/pip.log; exit 1; }
	@$(BIN)/pip install -q --constraint constraints.txt --editable '.[dev]' 2> $(VENV)/pip.log || { cat $(VENV)/pip.log; exit 1; }
	@touch $@

quickstart: install
	$(BIN)/isotype quickstart

quickstart-diffusion: install
	$(BIN)/isotype quickstart --diffusion

lint: style types

style: install
	$(BIN)/ruff check src tests benchmarks docs examples
	$(BIN)/ruff format --check src tests benchmarks docs examples

types: install
	$(BIN)/mypy

# every promise of README and docs; mypy, which takes one process, runs beside the tests
test: style
	$(MAKE) --jobs 2 types short-tests

short-tests: install
	$(BIN)/pytest -n 2 --dist worksteal -m "not full"

# random inputs, whole matrices, campaigns and GPU tests too
test-full: lint
	$(BIN)/pytest -n 2 --dist worksteal

format: install
	$(BIN)/ruff check --fix src tests benchmarks docs examples
	$(BIN)/ruff format src tests benchmarks docs examples

# the figures of docs/design/README.md: density, decisions and names, files of a step, calls of a layer, circles
size: install
	$(BIN)/python benchmarks/size.py

# the site; a warning fails
docs: install
	$(BIN)/python docs/build.py build/site

wheel: install
	rm -rf build/lib dist
	$(BIN)/pip wheel -q --no-deps -w dist .

clean:
	rm -rf $(VENV) quickstart quickstart-diffusion build dist
