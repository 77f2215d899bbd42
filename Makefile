# `make` lists the targets. Set-up is in .ci/setup, the settings of each tool are in pyproject.toml.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: setup test check demo crash live soak bench docs dist clean help

# Tests start hundreds of Python processes, each of which would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# Each with the Java that set-up chose; the second one can import the packages of tests/.
RUN    = JAVA_HOME="$$(cat .venv/.java-home)" .venv/bin/python
TOOL   = PYTHONPATH=.:tests $(RUN) -P -m
PYTEST = $(RUN) -m pytest

# More processes than there are cores, because tests wait for servers and Java. The tests with Spark run in one of them,
# as do those with BookKeeper, with a browser, or of a module (tests/conftest.py). The folder with the longest tests
# comes first. A process that crashes ends the run: pytest-xdist 3.8 would wait for its groups forever (its issue 1323).
PARALLEL = -n $$((2 * $$(nproc))) --dist loadgroup --max-worker-restart 0 --no-loadscope-reorder --durations=20
# Compiles every module once, beside the checks: otherwise each process of the tests would compile all of them.
COMPILE = $(PYTEST) --collect-only -q >/dev/null 2>&1 || true
CHECKS = .venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy && .venv/bin/lint-imports
# Of each crash layer in a soak, which goes on from the seeds of the one before.
CRASH_BUDGET ?= 30m
BENCHMARKS = hot_paths memory end_to_end pulsar beside_duckdb beside_bookkeeper

setup: ## make or refresh .venv, and find or install Java
	@bash .ci/setup

test: setup ## all that CI runs: format, lint, types, imports, every test
	@{ for part in browser stores bookkeeper classes; do bash .ci/setup $$part || exit; done; $(COMPILE); } & \
	{ $(CHECKS); }; failed=$$?; wait $$! && exit $$failed
	HYPOTHESIS_PROFILE=ci $(PYTEST) $(PARALLEL)

check: setup ## format, lint, types, imports and the fast tests of tests/unit, in about a minute
	$(CHECKS)
	HYPOTHESIS_PROFILE=dev $(PYTEST) $(PARALLEL) -m 'not slow' tests/unit

demo: setup ## kill a broker, then the example broker under Pulsar's own clients; ARGS='...' passes options of ackstate demo
	@JAVA_HOME="$$(cat .venv/.java-home)" .venv/bin/ackstate demo $(ARGS)
	@echo
	@echo "The same with examples/broker and Pulsar's own clients:"
	@$(RUN) -m examples.kill_and_compare out/broker

crash: setup ## every crash layer on ours, with fixed seeds, in a quarter of an hour; ARGS='--layer L1' runs one
	@bash .ci/setup bookkeeper
	$(TOOL) crash --seed 1 --budget 2m $(ARGS)

live: setup ## compare a real Pulsar broker with ackstate, into benchmarks/live.json; needs Maven; ARGS=kills runs one part
	@bash .ci/setup live
	$(TOOL) live benchmarks/live.json $(ARGS)

# Runs the tests that make test leaves out: those with the mark soak, and models, decoders and schedules with
# many more examples.
soak: setup ## hours: crashes (CRASH_BUDGET a layer), models with many more examples, planted bugs, mutants
	@for part in bookkeeper stores browser; do bash .ci/setup $$part || exit; done
	$(TOOL) crash --budget $(CRASH_BUDGET) --totals benchmarks/crash.json
	$(TOOL) museum.matrix --layers
	$(PYTEST) -m soak tests/system tests/model tests/unit
	$(TOOL) kills.plant
	$(TOOL) kills check --sample 200
	HYPOTHESIS_PROFILE=nightly $(PYTEST) tests/model
	FUZZ_INPUTS=300000 $(PYTEST) tests/unit/test_hostile_bytes.py
	SCHEDULES=1000000 $(PYTEST) tests/model/cursor/test_subscription_model.py -k random_schedules

bench: setup ## run every benchmark, into benchmarks/results; ARGS='hot_paths acks' runs one, or a part of it
	@set -e; if [ -n "$(ARGS)" ]; then PYTHONPATH=.:tests $(RUN) -m benchmarks.$(ARGS); \
	else for each in $(BENCHMARKS); do echo "benchmarks.$$each"; PYTHONPATH=.:tests $(RUN) -m benchmarks.$$each; done; fi

# ACKSTATE_SOURCE_URL, if set, is where sources can be read: https://HOST/OWNER/NAME/blob/main. Links of the README, the
# site and the project's URLs lead there; those of the README and the project by default to the remote `origin`.
# Not --quiet: then MkDocs would not count warnings.
docs: setup ## build the documentation site into out/site; it works offline, also when opened as files
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build
	@echo out/site/index.html

dist: setup ## the wheel, the source distribution and a bill of materials into dist/; two builds of a commit are equal
	rm -rf dist
	umask 022; export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct); \
		.venv/bin/python -m build --no-isolation --outdir dist && \
		.venv/bin/python -m twine check --strict dist/* && \
		.venv/bin/cyclonedx-py requirements .ci/requirements.txt --pyproject pyproject.toml --mc-type library \
			--output-reproducible --outfile dist/ackstate.cdx.json

clean: ## remove .venv, build leftovers, caches and out/
	rm -rf .venv build dist out *.egg-info .hypothesis .*_cache
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | expand -t 16
