# `make demo` trains on a data set that it renders itself, `make test` runs the tests, `make help` lists all targets: first
# those of a contributor's day (##), then those of a release or of CI (###).
PYTHON ?= python3
VENV ?= .venv
WHEEL_VENV ?= .venv-wheel
# The file that pins the versions of all packages; LOCK= uses the newest.
LOCK ?= constraints.txt
# The tests to run, and pytest options: make test TESTS='tests/models -k nms'
TESTS ?=
# The checks on a GPU to run: all, or a half, 'gpu and quick' or 'gpu and not quick'.
GPU_CHECKS ?= gpu
# The commit that `make same-bits` compares with, and the data set of its trainings.
BASE ?= HEAD
DATA ?= demo
# Number of test processes: one more than there are cores, because many tests wait for processes that they start.
# macOS has no sched_getaffinity.
CORES = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min($(CORES) + 1, 16))')
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
EXTRAS := export search convert tiff ncnn track
DEPENDENCY_GROUPS := dev
UV := .venv-uv/bin/uv
# All extras except litert, whose packages cap the versions of others.
LOCKED_EXTRAS := convert export ncnn ray search tiff track trackers
UV_COMPILE := $(UV) pip compile pyproject.toml $(LOCKED_EXTRAS:%=--extra %) --group dev --group clients --no-annotate --quiet

# Bytecode is kept, because many processes import the same modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo help check test same-bits test-newest test-lowest test-requirements test-slow test-gpu test-gpu-dry test-benchmarks test-extras test-extras-slow test-litert test-wheel lint types format lock clean always

demo: $(RUNTIME)  ## trains, validates and detects on a data set that it renders itself
	$(BIN)/python -m tools.demo demo/data
	$(BIN)/python train.py --data demo/data/data.yaml --model yolov8n --imgsz 128 --batch-size 16 --epochs 13 --hyp demo \
		--project demo --name train --exist-ok
	$(BIN)/python val.py --weights demo/train/best.pt --project demo --name val --exist-ok
	$(BIN)/python detect.py --weights demo/train/best.pt --source demo/data/images/val --project demo --name detect --exist-ok
	@echo
	@echo 'Open demo/train/report.html in a browser, and the images in demo/detect.'
	@echo 'Check your own data set (README.md says how to write its YAML): $(BIN)/python -m tools.check DATA.yaml'
	@echo 'Train on it: $(BIN)/python train.py --data DATA.yaml --weights yolox_s --epochs 50'
	@echo '(yolox_s is downloaded once; or give a file, such as yolov8n.pt. --model yolov8n trains from scratch.)'

help:
	@sed -nE 's/^([a-z0-9.%-]+):.*[^#]## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 18
	@echo
	@sed -nE 's/^([a-z0-9.%-]+):.*### (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

test: $(STAMP)  ## runs the tests, a few minutes; TESTS='tests/models -k nms' runs some of them
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

format: $(STAMP)  ## formats the code, and fixes what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint types test  ## lint, types and test: run it before a commit

lint: $(STAMP)  ## checks style and format with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## checks types with mypy
	$(BIN)/mypy

# Trains in a temporary checkout of BASE and in this one, with uncommitted changes.
same-bits: $(STAMP)  ## compares the weights of eight short trainings with those of the commit BASE, bit for bit: BASE=main
	base=$$(mktemp -d) && trap 'rm -rf "$$base"; git worktree prune' EXIT && trap 'exit 130' INT && \
		git worktree add --quiet --detach "$$base" $(BASE) && \
		$(BIN)/python -m benchmarks.same_bits --data $(DATA) --only bits --against "$$base"

test-newest:  ### runs the tests with the newest versions of all packages
	$(MAKE) test VENV=.venv-newest LOCK=

test-lowest: lowest.txt  ### runs the tests with the lowest versions that pyproject.toml allows
	$(MAKE) test VENV=.venv-lowest LOCK=lowest.txt

# Without make's other packages; the tests that need them are skipped.
test-requirements:  ### runs the tests with nothing but requirements.txt, in .venv-requirements
	$(PYTHON) -m venv --clear .venv-requirements
	.venv-requirements/bin/python -m pip install -r requirements.txt
	.venv-requirements/bin/python -m pytest $(TESTS)

test-python3.%:  ### test-python3.12 runs the tests with that Python
	$(MAKE) test VENV=.venv-python3.$* PYTHON=python3.$*

test-slow: $(STAMP)  ### runs the long tests: weekly, and before a release
	$(BIN)/python -m pytest -m slow -n $$(($(JOBS) - 1)) --dist worksteal $(TESTS)

# A check that hangs ends the call, with the stacks of all threads.
test-gpu: $(STAMP)  ### runs the checks that need an NVIDIA GPU; GPU_CHECKS='gpu and quick' runs the first half
	$(BIN)/python -m pytest -vv --durations=0 -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true \
		-m '$(GPU_CHECKS)' tests/gpu

test-gpu-dry: $(STAMP)  ### runs them on the CPU with tiny models, to see that they work
	LOCKSTEP_GPU_TESTS=cpu $(BIN)/python -m pytest --durations=0 -m '$(GPU_CHECKS)' tests/gpu

test-benchmarks: $(STAMP)  ### runs the tests of benchmarks/
	$(BIN)/python -m pytest -m 'benchmarks and not slow' tests/benchmarks

# Runs all tests, because many files have tests that are skipped without Ray, MLflow, Weights & Biases or a program that reads
# results.
WITH_EXTRAS := VENV=.venv-extras EXTRAS='$(EXTRAS) ray trackers' DEPENDENCY_GROUPS='dev clients'
test-extras:  ### runs the tests with the extras ray and trackers and the group clients, in .venv-extras
	$(MAKE) test $(WITH_EXTRAS)

test-extras-slow:  ### runs the long tests in .venv-extras
	$(MAKE) test-slow $(WITH_EXTRAS)

# Not in constraints.txt: the packages of this extra cap the versions of others.
test-litert:  ### runs all tests of LiteRT files with the extra litert, in .venv-litert
	$(MAKE) test VENV=.venv-litert LOCK= EXTRAS='export litert' \
		TESTS="-m 'not benchmarks' -k 'litert or tflite' tests/engine/export tests/scripts/test_export.py tests/test_no_network.py"

test-wheel: | $(UV)  ### builds the wheel, installs it in an empty environment, and uses it
	$(call new-environment,$(WHEEL_VENV),--clear)
	$(UV) build --wheel --out-dir $(WHEEL_VENV)/dist .
	$(call install,$(WHEEL_VENV)) $(WHEEL_VENV)/dist/*.whl
	tests/wheel.sh $(WHEEL_VENV)/bin

# Commit the new versions once the tests have passed with them.
lock: | $(UV)  ### writes the newest versions for Linux and all supported Pythons to constraints.txt
	$(UV_COMPILE) --universal --python-version 3.11 --upgrade --custom-compile-command 'make lock' -o constraints.txt

lowest.txt: pyproject.toml | $(UV)
	$(UV_COMPILE) --python $(PYTHON) --resolution lowest-direct -o $@

# The file is the target, not its folder, which also exists after a failed download.
$(UV):
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/python -m pip install uv

# uv takes a third of pip's time.
install = $(UV) pip install --python $(1) $(LOCK:%=-c %) --upgrade
define new-environment
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(2) $(1)
endef

REQUIREMENTS := pyproject.toml $(or $(LOCK),always)

# Installs the program's dependencies. The program itself runs from this folder.
$(RUNTIME): $(REQUIREMENTS) | $(UV)
	$(call new-environment,$(VENV))
	$(call install,$(VENV)) -r pyproject.toml
	touch $@

# Installs these and those of the tests in one step: the extra litert would replace a newer torch.
$(STAMP): $(REQUIREMENTS) | $(UV)
	$(call new-environment,$(VENV))
	$(call install,$(VENV)) -r pyproject.toml $(EXTRAS:%=--extra %) $(DEPENDENCY_GROUPS:%=--group %)
	touch $(RUNTIME) $@

clean:  ## removes environments, caches of the checks, and the demo
	rm -rf .venv .venv-* .mypy_cache .pytest_cache .ruff_cache lowest.txt demo
