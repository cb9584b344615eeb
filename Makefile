# `make demo` trains on a data set that it renders itself; `make test` runs the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow test-benchmarks lint clean

demo: $(STAMP)
	$(BIN)/python -m data.demo demo/data
	$(BIN)/python train.py --data demo/data/data.yaml --model yolov8n --imgsz 320 --batch-size 16 --epochs 30 --val-every 3 \
		--project demo --name train --exist-ok
	$(BIN)/python val.py --weights demo/train/best.pt --project demo --name val --exist-ok
	$(BIN)/python detect.py --weights demo/train/best.pt --source demo/data/images/val --project demo --name detect --exist-ok

# Bytecode is kept: hundreds of processes import the same modules.
test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

test-benchmarks: $(STAMP)
	$(BIN)/python -m pytest -m 'benchmarks and not slow' tests/benchmarks

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

EXTRAS := export search convert store tiff
REQUIREMENTS := requirements.txt $(EXTRAS:%=requirements-%.txt)

$(STAMP): $(REQUIREMENTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install $(REQUIREMENTS:%=-r %)
	touch $(STAMP)

clean:
	rm -rf $(VENV) demo
