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
# The test of users' networks takes each n-th cell of its matrix; `make proof` takes all.
CELL_STEP ?= 13
# Duration of `make soak`, and length of `make chaos`.
MINUTES ?= 20
ROUNDS ?= 200
# The tests of a file stay in one process, because they share servers.
BY_FILE := --dist loadfile

# Options of the load test, such as: make load LOAD="--url http://HOST:8000".
LOAD ?= --seconds 10

# Extras in the bundle of `make offline`, and the largest size of its parts. There, PYTHON may be a version: 3.12.
EXTRAS ?= embedded,cpu,text,publish,gateway
PART ?= 100M

# The records of `make bench`, in this order; `make record-NAME` writes one of them.
RECORDS := $(addprefix record-,pieces preprocess parity bench route backend memory clients gateway recovery swap \
	stall trials tune_proof guard attack containers idle \
	ceilings connections default_choice rollouts rollout_simulation rollout_cost observability_cost drift_simulation \
	signal_cost incidents reading_accuracy reading_speed chaos)
# One target after the other. If one fails, the others still run, and the whole fails at the end.
EACH = $(MAKE) --no-print-directory --keep-going --jobs=1

.PHONY: help setup demo serve check test test-slow containers load proof bench gpu-check chaos soak profile pictures docs lock site dist offline clean $(RECORDS)
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

check: .venv/.testing  ## check format, lint, types, imports, docstrings; run the contract tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/interrogate -v --omit-covered-files tests
	$(BIN)/pytest --quiet tests/contract

test: .venv/.testing  ## run all tests except the long ones and those of check, also against the real server
	$(BIN)/pytest -n 3 $(BY_FILE) -m 'not slow' --ignore tests/contract

containers: .venv/.testing  ## run docker-compose.yml in a container engine of its own; needs root and Debian's apt
	$(BIN)/pytest -m slow -rs tests/e2e/test_containers.py

test-slow: .venv/.testing  ## run the long tests, with SLOW_REQUESTS (1000) requests each
	SLOW_REQUESTS=$(SLOW_REQUESTS) CELL_STEP=$(CELL_STEP) $(BIN)/pytest -n 3 $(BY_FILE) --no-loadscope-reorder --durations 25 -m slow

load: .venv/.testing  ## run the load test: a closed and an open loop, compared with thresholds.toml
	$(BIN)/python -m loadtest.load $(LOAD)

proof: .venv/.testing  ## run bench, and the long tests with 20000 requests each
	@$(EACH) bench test-slow SLOW_REQUESTS=20000 CELL_STEP=1

bench: .venv/.testing  ## measure everything, and write the records in loadtest/results
	@$(EACH) $(RECORDS)

$(RECORDS): .venv/.testing
record-pieces:
	$(BIN)/python -m loadtest.pieces --record pieces
record-preprocess:
	$(BIN)/python -m loadtest.preprocess --record preprocess
record-parity:
	$(BIN)/python -m loadtest.parity --wallpapers photos --record parity
record-bench:
	$(BIN)/python -m loadtest.bench --record bench
record-route:
	$(BIN)/python -m loadtest.route --record route
record-backend:
	$(BIN)/python -m loadtest.backend --record backend
record-memory:
	$(BIN)/python -m loadtest.memory --record memory
record-clients:
	$(BIN)/python -m loadtest.clients --rounds 3 --seconds 2 --record clients
record-gateway:
	$(BIN)/python -m loadtest.gateway --record gateway
record-recovery:
	$(BIN)/python -m loadtest.recovery --record recovery
record-swap:
	$(BIN)/python -m loadtest.swap --record swap
record-stall:
	$(BIN)/python -m loadtest.stall --record stall
record-trials:
	$(BIN)/python -m loadtest.trials --rounds 4 --record trials
record-tune_proof:
	$(BIN)/python -m loadtest.tune_proof --record tune_proof
record-guard:
	$(BIN)/python -m loadtest.guard --rounds 8 --seconds 3 --record guard
record-attack:
	$(BIN)/python -m loadtest.attack --seconds 60 --cases 1000000 --record attack
record-containers:
	$(BIN)/python -m loadtest.containers --record containers
record-idle:
	$(BIN)/python -m loadtest.idle --record idle
record-ceilings:
	$(BIN)/python -m loadtest.ceilings --record ceilings
record-connections:
	$(BIN)/python -m loadtest.connections --record connections
record-default_choice:
	$(BIN)/python -m loadtest.default_choice --record default_choice
record-rollouts:
	$(BIN)/python -m loadtest.rollouts --record rollouts
record-rollout_simulation:
	$(BIN)/python -m loadtest.rollout_simulation --record rollout_simulation
record-rollout_cost:
	$(BIN)/python -m loadtest.rollout_cost --record rollout_cost
record-observability_cost:
	$(BIN)/python -m loadtest.observability_cost --rounds 5 --seconds 4 --record observability_cost
record-drift_simulation:
	$(BIN)/python -m loadtest.drift_simulation --record drift_simulation
record-signal_cost:
	$(BIN)/python -m loadtest.signal_cost --record signal_cost
record-incidents:
	$(BIN)/python -m loadtest.incidents --record incidents
record-reading_accuracy:
	$(BIN)/python -m loadtest.reading_accuracy --record reading_accuracy
record-reading_speed:
	$(BIN)/python -m loadtest.reading_speed --record reading_speed
record-chaos:
	$(BIN)/python -m loadtest.chaos --record chaos

gpu-check: .venv/.testing  ## check everything that needs an NVIDIA GPU, in ten minutes; RECORD=gpu_check writes the record
	loadtest/gpu_check.sh $(if $(RECORD),--record $(RECORD))

chaos: .venv/.testing  ## let ROUNDS (200) faults happen to a server under load; needs root
	$(BIN)/python -m loadtest.chaos --rounds $(ROUNDS)

soak: .venv/.testing  ## run the soak test for MINUTES (20); RECORD=soak writes the record
	$(BIN)/python -m loadtest.soak --minutes $(MINUTES) $(if $(RECORD),--record $(RECORD))

profile: .venv/.testing  ## write flame graphs of gateway, route and model under load; root, or ptrace allowed
	$(BIN)/python -m loadtest.profile_server

pictures: .venv/.testing  ## draw docs/top.svg: nereid top, and a server and a gateway under load
	$(BIN)/python -m loadtest.top_picture

docs: .venv/.testing  ## write docs/metrics.md, docs/benchmarks.md and the JSON Schemas from the code and the records
	$(BIN)/python -m tools.commands_page
	$(BIN)/python -m tools.metrics_page
	$(BIN)/python -m loadtest.bench.page
	$(BIN)/python -m loadtest.rollout_plot
	$(BIN)/python -m loadtest.gpu_check.page

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
