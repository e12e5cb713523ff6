# All tasks of this repository, also of CI. `make` alone lists the targets.
# The first Python that passes the check; otherwise python3, whose check then reports what is missing.
FIT = $(shell for each in python3 python3.12 python3.11; do \
	$$each nereid/server/preflight.py >/dev/null 2>&1 && { echo $$each; break; }; done)
PYTHON ?= $(or $(FIT),python3)
BIN := .venv/bin
# ONNX Runtime's CPU and GPU packages contain the same files, so a machine gets one of them.
RUNTIME := $(if $(wildcard /proc/driver/nvidia/version),gpu,cpu)
# Number of requests that each long test sends; `make proof` sends the full number.
SLOW_REQUESTS ?= 1000
# Duration of `make soak`, and length of `make chaos`.
MINUTES ?= 20
ROUNDS ?= 200
# Tests that share a server run in the same process (tests/conftest.py); the longest groups begin.
PYTEST = $(BIN)/pytest -n 3 --dist loadgroup --no-loadscope-reorder

# Options of the load test, such as: make load LOAD="--url http://HOST:8000".
LOAD ?= --seconds 10

# Extras in the bundle of `make offline`, and the largest size of its parts. There, PYTHON may be a version: 3.12.
EXTRAS ?= embedded,cpu,text,publish,gateway
PART ?= 100M

# The records of `make bench`, in this order; `make record-NAME` writes one of them.
RECORDS := $(addprefix record-,bench recovery attack rollout_simulation reading_accuracy reading_speed chaos)
# One target after the other. If one fails, the others still run, and the whole fails at the end.
EACH = $(MAKE) --no-print-directory --keep-going --jobs=1

.PHONY: help setup demo serve check fix unit test test-slow nightly containers load proof bench gpu-check chaos soak docs lock site dist offline clean $(RECORDS)
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.serving  ## create .venv with all packages that serving needs

.venv/.serving: pyproject.toml
	@command -v $(PYTHON) >/dev/null || \
		{ echo "missing: Python 3.11 or 3.12; fix: apt-get install python3 python3-venv libpython3.11"; exit 1; }
	@$(PYTHON) nereid/server/preflight.py
	@echo "setting up .venv with $(PYTHON) …"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[embedded,$(RUNTIME),text,publish,gateway]'
	@touch $@

.venv/.testing: .venv/.serving
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[embedded,$(RUNTIME),text,publish,gateway,traces,load,dev]'
	@touch $@

demo: setup  ## start the real Triton server, classify the sample photo with both versions, stop
	@$(BIN)/nereid demo

serve: setup  ## serve until Ctrl-C on ports 8000 (HTTP), 8001 (gRPC), 8002 (metrics)
	@$(BIN)/nereid serve

check: .venv/.testing  ## check format, lint, types, imports; run the contract tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.long_sentences
	$(BIN)/pytest --quiet tests/contract

fix: .venv/.testing  ## format, and apply lint's safe fixes
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

unit: .venv/.testing  ## run the tests that start no server or other process, in less than a minute
	$(PYTEST) --quiet -m 'not slow and not nightly and not process' tests/unit

test: .venv/.testing  ## run all tests except the long ones and those of check, also against the real server; TESTS chooses
	$(PYTEST) -m 'not slow and not nightly' --ignore tests/contract $(TESTS)

containers: .venv/.testing  ## run docker-compose.yml in a container engine of its own; needs root and Debian's apt
	$(BIN)/pytest -m nightly -rs tests/e2e/test_containers.py

test-slow: .venv/.testing  ## run the long tests, with SLOW_REQUESTS (1000) requests each; NIGHTLY_PART adds nightly ones
	SLOW_REQUESTS=$(SLOW_REQUESTS) $(PYTEST) --durations 25 -m 'slow $(if $(NIGHTLY_PART),or,and not) nightly'

nightly: .venv/.testing  ## run what takes minutes and changes rarely; NIGHTLY_PART=1 to 4 runs a quarter of it
	SLOW_REQUESTS=$(SLOW_REQUESTS) $(PYTEST) --durations 25 -m nightly

load: .venv/.testing  ## run the load test: a closed and an open loop, compared with thresholds.toml
	$(BIN)/python -m loadtest.load $(LOAD)

proof: .venv/.testing  ## run bench, and the long tests with 20000 requests each
	@$(EACH) bench test-slow nightly SLOW_REQUESTS=20000

bench: .venv/.testing  ## measure everything, and write the records in loadtest/results
	@$(EACH) $(RECORDS)

$(RECORDS): .venv/.testing
record-bench:
	$(BIN)/python -m loadtest.bench --record bench
record-recovery:
	$(BIN)/python -m loadtest.recovery --record recovery
record-attack:
	$(BIN)/python -m loadtest.attack --seconds 60 --cases 100000 --record attack
record-rollout_simulation:
	$(BIN)/python -m loadtest.rollout_simulation --record rollout_simulation
record-reading_accuracy:
	$(BIN)/python -m loadtest.reading_accuracy --record reading_accuracy
record-reading_speed:
	$(BIN)/python -m loadtest.reading_speed --record reading_speed
record-chaos:
	$(BIN)/python -m loadtest.torture --rounds 200 --record chaos

gpu-check: .venv/.testing  ## check everything that needs an NVIDIA GPU, in ten minutes; RECORD=gpu_check writes the record
	loadtest/gpu_check.sh $(if $(RECORD),--record $(RECORD))

chaos: .venv/.testing  ## inject ROUNDS (200) faults into a server under load; needs root
	$(BIN)/python -m loadtest.torture --rounds $(ROUNDS)

soak: .venv/.testing  ## run the soak test for MINUTES (20); RECORD=soak writes the record
	$(BIN)/python -m loadtest.torture --minutes $(MINUTES) $(if $(RECORD),--record $(RECORD))

docs: .venv/.testing  ## write the JSON Schemas, docs/metrics.md, and the measured parts of README.md and docs/ from code and records
	$(BIN)/python -m tools.commands_page
	$(BIN)/python -m tools.metrics_page
	$(BIN)/python -m loadtest.bench.page
	$(BIN)/python -m loadtest.gpu_check.claims

lock: .venv/.testing  ## write deploy/constraints.txt: the versions of all packages in the images
	@$(BIN)/pip install --quiet uv
	@{ echo '# Versions of all packages in the images. Written by `make lock`.'; \
		$(BIN)/uv pip compile --quiet --no-annotate --no-header --python-version 3.12 pyproject.toml \
		$(addprefix --extra ,embedded cpu gpu13 text gateway publish traces load); } > deploy/constraints.txt.new
	@mv deploy/constraints.txt.new deploy/constraints.txt

site: .venv/.site  ## build the documentation site in site/; it works without a network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --clean --strict
	@echo "built site/index.html"

.venv/.site: .venv/.serving
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

dist: .venv/.testing  ## build the wheel and the sdist of `nereid-serving` in dist/
	$(BIN)/python -m build --outdir dist .

# The Python of the target need not be here: any supported Python with pip builds the bundle.
BUILDER = $(or $(wildcard $(BIN)/python),$(FIT),python3)
offline:  ## build a bundle for machines without a network in dist/offline, from EXTRAS, PYTHON (3.12) and PART (100M)
	@$(if $(wildcard $(BIN)/python),,$(BUILDER) -c 'import pip' 2>/dev/null || \
		{ echo "missing: pip for $(BUILDER); fix: make setup"; exit 1; };) \
		$(BUILDER) -m tools.offline_bundle --extras '$(EXTRAS)' --part '$(PART)' \
		$(if $(filter-out file,$(origin PYTHON)),--python '$(PYTHON)')

clean:  ## remove .venv, caches, built files, and the state next to the default repository
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .schemathesis dist site .*.nereid
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
