# `make` lists the targets. Set-up is in .ci/setup, the settings of each tool are in pyproject.toml.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup lock demo demo-broker test lint check spark crash calibrate kill-matrix freeze-check live soak bench bench-delay bench-scale bench-pulsar bench-interceptor dist docs clean

# Tests start hundreds of Python processes, each of which would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# The command that follows runs with the Java that set-up chose.
JAVA   = JAVA_HOME="$$(cat .venv/.java-home)"
PYTEST = $(JAVA) .venv/bin/python -m pytest

# More processes than there are cores, because tests wait for servers and Java. The tests with Spark run in one of them,
# as do those with BookKeeper, with a browser, or of a module (tests/conftest.py). The folder with the longest tests
# comes first. A process that crashes ends the run: pytest-xdist 3.8 would wait for its groups forever (its issue 1323).
PARALLEL = -n $$((2 * $$(nproc))) --dist loadgroup --max-worker-restart 0 --no-loadscope-reorder --durations=20
# Compiles every module once, beside lint: otherwise each process of the tests would compile all of them.
COMPILE = $(PYTEST) --collect-only -q >/dev/null 2>&1 || true
# Of each crash layer in a soak, which goes on from the seeds of the one before.
CRASH_BUDGET ?= 30m

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | expand -t 16

setup: ## make or refresh .venv, and find or install Java
	@bash .ci/setup

lock: setup ## upgrade the locked Python packages, all or NAMES='a b'
	bash .ci/lock $(NAMES)
	@bash .ci/setup

demo: setup ## kill a broker, then the example broker under Pulsar's own clients; ARGS='...' passes options of ackstate demo
	@$(JAVA) .venv/bin/ackstate demo $(ARGS)
	@echo
	@echo "The same with examples/broker and Pulsar's own clients:"
	@$(MAKE) --no-print-directory demo-broker ARGS=

demo-broker: setup ## kill the example broker under Pulsar's own clients; ARGS='--seed 7' chooses the moment
	@$(JAVA) .venv/bin/python -m examples.kill_and_compare out/broker $(ARGS)

test: setup ## all that CI runs: format, lint, types, imports, every test
	@{ for part in browser stores bookkeeper classes; do bash .ci/setup $$part || exit; done; $(COMPILE); } & \
	$(MAKE) --no-print-directory lint; failed=$$?; wait $$! && exit $$failed
	HYPOTHESIS_PROFILE=ci $(PYTEST) $(PARALLEL)

lint: setup ## format, lint, types, imports
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

check: lint ## format, lint, types, imports and the fast tests of tests/unit, in about a minute
	HYPOTHESIS_PROFILE=dev $(PYTEST) $(PARALLEL) -m 'not slow' tests/unit

spark: setup ## the tests that start Spark
	@bash .ci/setup stores
	$(PYTEST) -m 'spark and not soak' tests/system

crash: setup ## every crash layer on ours, with fixed seeds, in a quarter of an hour
	@bash .ci/setup bookkeeper
	PYTHONPATH=.:tests $(JAVA) .venv/bin/python -P -m crash --seed 1 --budget 2m

calibrate: setup ## compare the estimate with kills of real cursors, into benchmarks/calibration.json
	$(JAVA) .venv/bin/python -m benchmarks.calibration --out benchmarks/calibration.json

kill-matrix: setup ## run every crash layer on every bug of the museum, into tests/museum/matrix.json
	PYTHONPATH=.:tests .venv/bin/python -P -m museum.matrix

freeze-check: setup ## compare answers with the frozen ones, then run the killers of the mutants again; SAMPLE=200 of them
	PYTHONPATH=.:tests $(JAVA) .venv/bin/python -P -m frozen check $(ARGS)
	PYTHONPATH=tests .venv/bin/python -P -m kills check $(if $(SAMPLE),--sample $(SAMPLE))

live: setup ## compare a real Pulsar broker with ackstate, into benchmarks/live.json; needs Maven; ARGS=kills runs one part
	@bash .ci/setup live
	PYTHONPATH=.:tests $(JAVA) .venv/bin/python -P -m live benchmarks/live.json $(ARGS)

# Runs the tests that make test leaves out: those with the mark soak, and models, decoders and schedules with
# many more examples.
soak: setup ## hours: crashes (CRASH_BUDGET a layer), models with many more examples, planted bugs
	@bash .ci/setup bookkeeper
	PYTHONPATH=.:tests $(JAVA) .venv/bin/python -P -m crash --budget $(CRASH_BUDGET) --totals benchmarks/crash.json
	PYTHONPATH=.:tests .venv/bin/python -P -m museum.matrix --layers
	@bash .ci/setup stores
	@bash .ci/setup browser
	$(PYTEST) -m soak tests/system tests/model tests/unit
	PYTHONPATH=.:tests $(JAVA) .venv/bin/python -P -m kills.plant
	HYPOTHESIS_PROFILE=nightly $(PYTEST) tests/model
	FUZZ_INPUTS=300000 $(PYTEST) tests/unit/test_hostile_bytes.py
	SCHEDULES=1000000 $(PYTEST) tests/model/cursor/test_subscription_model.py -k random_schedules

bench: setup ## run every benchmarks/bench_*.py
	@set -e; for file in benchmarks/bench_*.py; do \
		if [ ! -e "$$file" ]; then echo "no benchmarks: benchmarks/bench_*.py matches nothing"; break; fi; \
		name=$${file##*/}; \
		echo "benchmarks.$${name%.py}"; \
		PYTHONPATH=tests $(JAVA) .venv/bin/python -m "benchmarks.$${name%.py}"; \
	done

bench-scale: setup ## time the Spark estimate by the size of the trace, next to DuckDB
	$(JAVA) .venv/bin/python -m benchmarks.scale.bench_scale

bench-pulsar: setup ## time Pulsar's own classes next to ours; needs Maven and a JDK
	$(JAVA) .venv/bin/python -m benchmarks.pulsar.bench_pulsar

bench-interceptor: setup ## measure what the interceptor costs a real Pulsar broker; needs Maven
	@bash .ci/setup live
	PYTHONPATH=.:tests $(JAVA) .venv/bin/python -P -m live.interceptor_cost $(ARGS)

bench-delay: setup ## run every benchmarks/delay/bench_*.py
	@set -e; for file in benchmarks/delay/bench_*.py; do \
		name=$${file##*/}; \
		echo "benchmarks.delay.$${name%.py}"; \
		.venv/bin/python -m "benchmarks.delay.$${name%.py}"; \
	done

# ACKSTATE_SOURCE_URL, if set, is where sources can be read: https://HOST/OWNER/NAME/blob/main. Links of the README and
# the project's URLs lead there, by default to the remote `origin`.
dist: setup ## the wheel, the source distribution and a bill of materials into dist/; two builds of a commit are equal
	rm -rf dist
	umask 022; export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct); \
		.venv/bin/python -m build --no-isolation --outdir dist && \
		.venv/bin/python -m twine check --strict dist/* && \
		.venv/bin/cyclonedx-py requirements .ci/requirements.txt --pyproject pyproject.toml --mc-type library \
			--output-reproducible --outfile dist/ackstate.cdx.json

# ACKSTATE_SOURCE_URL, if set, is where the site's links to source files lead: https://HOST/OWNER/NAME/blob/main.
# Not --quiet: then MkDocs would not count warnings.
docs: setup ## build the documentation site into out/site; it works offline, also when opened as files
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build
	@echo out/site/index.html

clean: ## remove .venv, build leftovers, caches and out/
	rm -rf .venv build dist out *.egg-info .hypothesis .*_cache
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
