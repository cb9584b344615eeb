# `make demo` trains on a data set that it renders itself; `make test` runs the tests.
PYTHON ?= python3
# The versions of all packages: those of the tested file, LOCK= the newest, LOCK=lowest.txt the lowest that are allowed.
LOCK ?= constraints.txt
VENV ?= .venv$(patsubst %,-%,$(filter-out python3,$(notdir $(PYTHON))))$(VENV_OF_LOCK)
VENV_OF_LOCK := $(if $(LOCK),$(patsubst %,-%,$(filter-out constraints,$(basename $(notdir $(LOCK))))),-newest)
WHEEL_VENV ?= .venv-wheel
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
EXTRAS := export search convert tiff
UV := .venv-uv/bin/uv
UV_COMPILE := $(UV) pip compile pyproject.toml --all-extras --group dev --no-annotate --quiet

# Bytecode is kept: many processes import the same modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-benchmarks test-wheel lint lock clean always

demo: $(RUNTIME)
	$(BIN)/python -m tools.demo demo/data
	$(BIN)/python train.py --data demo/data/data.yaml --model yolov8n --imgsz 128 --batch-size 16 --epochs 13 --hyp demo \
		--project demo --name train --exist-ok
	$(BIN)/python val.py --weights demo/train/best.pt --project demo --name val --exist-ok
	$(BIN)/python detect.py --weights demo/train/best.pt --source demo/data/images/val --project demo --name detect --exist-ok
	@echo
	@echo 'Open demo/train/report.html in a browser, and the images in demo/detect.'
	@echo 'Check your own data set (README.md says how to write its YAML): $(BIN)/python -m tools.check DATA.yaml'
	@echo 'Train on it: $(BIN)/python train.py --data DATA.yaml --model yolov8n --epochs 100'

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

test-benchmarks: $(STAMP)
	$(BIN)/python -m pytest -m 'benchmarks and not slow' tests/benchmarks

# Builds the wheel, installs it in an environment that has nothing else, and uses it.
test-wheel: | .venv-uv
	$(call new-environment,$(WHEEL_VENV),--clear)
	$(UV) build --wheel --out-dir $(WHEEL_VENV)/dist .
	$(call install,$(WHEEL_VENV)) $(WHEEL_VENV)/dist/*.whl
	tests/wheel.sh $(WHEEL_VENV)/bin

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

# The newest versions for Linux and all supported Pythons become the tested ones, if the tests then pass.
lock: | .venv-uv
	$(UV_COMPILE) --universal --python-version 3.11 --upgrade --custom-compile-command 'make lock' -o constraints.txt

lowest.txt: pyproject.toml | .venv-uv
	$(UV_COMPILE) --python $(PYTHON) --resolution lowest-direct -o $@

.venv-uv:
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install uv

# uv takes a third of pip's time.
install = $(UV) pip install --python $(1) $(LOCK:%=-c %) --upgrade
define new-environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(2) $(1)
endef

# What the program needs, and what the tests need besides. The program itself runs from this folder.
$(RUNTIME): pyproject.toml $(or $(LOCK),always) | .venv-uv
	$(call new-environment,$(VENV))
	$(call install,$(VENV)) -r pyproject.toml
	touch $@

$(STAMP): $(RUNTIME)
	$(call install,$(VENV)) -r pyproject.toml $(EXTRAS:%=--extra %) --group dev
	touch $@

clean:
	rm -rf .venv .venv-* lowest.txt demo
