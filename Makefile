# `make` lists the targets. Set-up is in .ci/setup, the settings of each tool are in pyproject.toml.

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test lint check spark crash calibrate kill-matrix pulsar-replay soak bench bench-delay bench-scale clean

# Tests start hundreds of Python processes, each of which would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# The command that follows runs with the Java that set-up chose.
JAVA   = JAVA_HOME="$$(cat .venv/.java-home)"
PYTEST = $(JAVA) .venv/bin/python -m pytest

# All tests run in three processes side by side, for many wait, for other programs or for the disk, more than they
# compute: those that need Spark, a disk of their own or a browser; what analyses; the rest.
HEAVY := spark or root or browser
ANALYSIS := ackstate/analysis tests/unit/analysis tests/model/analysis tests/system/analysis tests/model/museum
FAST  := not slow and not soak and not spark and not root and not browser
# Of each crash layer in a soak, which goes on from the seeds of the one before.
CRASH_BUDGET ?= 30m

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | expand -t 16

setup: ## make or refresh .venv, and find or install Java
	@bash .ci/setup

demo: setup ## run the demo; ARGS='...' passes options on
	@$(JAVA) .venv/bin/ackstate demo $(ARGS)

test: setup ## all that CI runs: format, lint, types, imports, every test
	@bash .ci/setup browser
	@bash .ci/setup stores
	@bash .ci/setup classes & $(MAKE) --no-print-directory lint; failed=$$?; wait; exit $$failed
	@export HYPOTHESIS_PROFILE=ci; shown_after=$$(mktemp -d); failed=0; \
	$(PYTEST) -m '($(HEAVY)) and not soak' >"$$shown_after/2" 2>&1 & heavy=$$!; \
	$(PYTEST) -m 'not ($(HEAVY) or soak)' $(ANALYSIS) >"$$shown_after/1" 2>&1 & analysis=$$!; \
	$(PYTEST) -m 'not ($(HEAVY) or soak)' $(ANALYSIS:%=--ignore=%) || failed=1; \
	wait $$analysis || failed=1; wait $$heavy || failed=1; cat "$$shown_after"/*; rm -r "$$shown_after"; \
	exit $$failed

lint: setup ## format, lint, types, imports
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports

check: lint ## format, lint, types, imports and the fast tests, in under a minute
	HYPOTHESIS_PROFILE=dev $(PYTEST) -m '$(FAST)'

spark: setup ## the tests that start Spark
	@bash .ci/setup stores
	$(PYTEST) -m spark

crash: setup ## every crash layer on ours, with fixed seeds, in a quarter of an hour
	$(JAVA) .venv/bin/ackstate crash --layer all --seed 1 --budget 2m

calibrate: setup ## compare the estimate with kills of real cursors, into benchmarks/calibration.json and docs/calibration.md
	$(JAVA) .venv/bin/python -m benchmarks.calibration --out benchmarks/calibration.json
	.venv/bin/python -m benchmarks.calibration.page benchmarks/calibration.json benchmarks/calibration.svg docs/calibration.md

kill-matrix: setup ## run every crash layer on every bug of the museum, into docs/kill-matrix.md
	PYTHONPATH=.:tests .venv/bin/python -P -m museum.matrix

RECORDED_ENDS = $(addprefix tests/vectors/broker-redelivery,.jsonl.gz -missed.jsonl.gz -typed.jsonl.gz)

pulsar-replay: setup ## compare the redelivery of real Pulsar brokers with its prediction, into docs/pulsar-replay.md
	.venv/bin/python -P -m ackstate.analysis.pulsar.replay_table $(RECORDED_ENDS) docs/pulsar-replay.md

soak: setup ## hours: crashes (CRASH_BUDGET a layer), models with many more examples, a million inputs for the decoders
	$(JAVA) .venv/bin/ackstate crash --layer all --budget $(CRASH_BUDGET) --totals benchmarks/crash.json
	PYTHONPATH=.:tests .venv/bin/python -P -m museum.matrix --layers
	$(PYTEST) -m soak
	HYPOTHESIS_PROFILE=nightly $(PYTEST) -k model
	FUZZ_INPUTS=300000 $(PYTEST) -k fuzz
	GATE_SCHEDULES=1000000 $(PYTEST) -k gate_schedules
	SCHEDULES=1000000 $(PYTEST) tests/model/cursor/test_subscription_model.py -k random_schedules

bench: setup ## run every benchmarks/bench_*.py
	@set -e; for file in benchmarks/bench_*.py; do \
		if [ ! -e "$$file" ]; then echo "no benchmarks: benchmarks/bench_*.py matches nothing"; break; fi; \
		name=$${file##*/}; \
		echo "benchmarks.$${name%.py}"; \
		$(JAVA) .venv/bin/python -m "benchmarks.$${name%.py}"; \
	done

bench-scale: setup ## time the Spark estimate by the size of the trace, next to DuckDB, and draw it
	$(JAVA) .venv/bin/python -m benchmarks.scale.bench_scale
	.venv/bin/python -m benchmarks.scale.draw

bench-delay: setup ## run every benchmarks/delay/bench_*.py and draw the results
	@set -e; for file in benchmarks/delay/bench_*.py; do \
		name=$${file##*/}; \
		echo "benchmarks.delay.$${name%.py}"; \
		.venv/bin/python -m "benchmarks.delay.$${name%.py}"; \
	done
	@.venv/bin/python -m benchmarks.delay.draw

clean: ## remove .venv, build leftovers, caches and out/
	rm -rf .venv build dist out *.egg-info .hypothesis .*_cache
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
