# `make reproduce` and `make test` do all the set-up: a .venv with pinned packages, then the job.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MATHJAX := docs/node_modules/mathjax/package.json
# VKERNEL_DATA and VKERNEL_MODELS, where set, say where real data and other people's networks lie.
.PHONY: reproduce reproduce-all test test-all test-oldest lint docs bench release-check clean

reproduce: $(STAMP)
	$(BIN)/vkernel reproduce --out out

# Adds the shipped studies; it may be stopped, and goes on when called again.
reproduce-all: $(STAMP)
	$(BIN)/vkernel reproduce --out out --all

# Workers of one thread each: no thread waits for another. Some tests wait for processes and browsers, so that three
# workers keep two cores busy; tests/conftest.py gives tests that share a costly fixture to one of them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 3

test: lint
	$(PYTEST)

# the documentation first: a browser looks at what was built
test-all: lint $(VENV)/.loops docs
	$(PYTEST) -m ""

# the lowest versions that pyproject.toml promises, in an environment of their own
test-oldest: $(STAMP)
	$(BIN)/python release/oldest.py .venv-oldest

# builds twice, installs the wheel alone into an empty environment, runs every command; leaves the archives in dist/
release-check: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	$(BIN)/python release/check.py

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

# all pages are written (-a), since the search index of a partial build lacks the words of the glossary
docs: $(VENV)/.docs $(MATHJAX)
	$(BIN)/sphinx-build -a -W --keep-going -n -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# torch first and alone: what the other packages ask of it is then met by the pinned build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,data,audit,study,netcdf,adaptive,ray,explore,monitor]'
	touch $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# the renderer of mathematics, which the built site ships
$(MATHJAX): docs/package-lock.json
	npm ci --prefix docs --ignore-scripts --no-audit --no-fund --silent
	touch $@

# libraries whose training loops take a monitor
$(VENV)/.loops: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[loops]'
	touch $@

$(VENV)/.bench: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest out docs/_build docs/gallery docs/tutorials docs/node_modules build dist
