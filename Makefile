# make install   .venv with Craton and everything its tests need
# make demo      train a small model on this machine: plan, run, kill a rank, stop, resume on other ranks, export, sample
# make lifecycle pretrain, SFT, DPO, GRPO and serve one small model, and count its right answers after each stage
# make plans     plan the example jobs and write their reports
# make test      style, types, imports, tests
# make test-all  the same with the tests that take minutes, and with new cases of the property tests
# make chaos     break small trainings in every way, dozens of times, and hold each against one that nothing happened to
# make bench     predict every published run and print the errors
# make bench-grpo what GRPO adds to a fine-tuned model, for three seeds, beside two controls; takes half an hour
# make bench-why break real runs in many ways and score the diagnosis; takes hours
# Each target does its own set-up; nothing is done twice.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
TRAIN_STAMP := $(VENV)/.trains
# Of the tests: one more than two cores, for tests of processes wait for part of their time.
WORKERS ?= 3
CRATON := $(VENV)/bin/craton
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PLANNED_JOBS := $(filter-out $(wildcard examples/custom-*.yaml examples/command-*.yaml examples/sweep.yaml), \
  $(wildcard examples/*.yaml))

# Containers often set this variable. Without bytecode each of the suite's thousand processes compiles Craton again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install browser slurm observers sandbox validators evaluators demo lifecycle plans test test-all test-gpu chaos bench \
  bench-grpo bench-why clean

install: $(STAMP)
	@echo "Craton is installed in $(VENV): try $(CRATON) --help"

$(STAMP): $(VENV)/bin/pip pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[test]'
	@touch $@ $(TRAIN_STAMP)

$(TRAIN_STAMP): $(VENV)/bin/pip pyproject.toml constraints.txt
	$(PIP_INSTALL) -e '.[train]'
	@touch $@

# ensurepip is what Debian and Ubuntu leave out of python3; without it no virtual environment can hold pip.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Craton needs Python 3.11 or newer; call 'make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)'"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing python3-venv"; apt-get update -qq && apt-get install -y -qq python3-venv; \
	  else \
	    echo "Python's venv module is incomplete: install the package python3-venv (Debian, Ubuntu), then call make again"; \
	    exit 1; \
	  fi; }
	@$(PYTHON) -m venv $(VENV)

# The report is tested in a real browser; where none can be had, that test is skipped and says so.
browser:
	@if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing chromium"; \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
	    || echo "chromium could not be installed: the browser test will be skipped"; \
	fi

# The validators of `craton cluster provision` need other versions than Craton, so they live apart; where they cannot be
# had, their tests are skipped and say so.
AWS_STAMP := .venv-aws/.installed
validators:
	@$(MAKE) --no-print-directory $(AWS_STAMP) || echo "the validators could not be installed: their tests will be skipped"

$(AWS_STAMP): $(VENV)/bin/pip requirements-validators.txt
	@$(PYTHON) -m venv .venv-aws
	@.venv-aws/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-validators.txt
	@touch $@

# The server is held against lm-evaluation-harness, and the suite `reasoning` has tasks of reasoning-gym, which needs a C
# compiler; where one of them cannot be had, its test is skipped and says so.
LM_EVAL_STAMP := $(VENV)/.lm-eval
REASONING_STAMP := $(VENV)/.reasoning
evaluators:
	@$(MAKE) --no-print-directory $(LM_EVAL_STAMP) || echo "lm-eval could not be installed: its test will be skipped"
	@$(MAKE) --no-print-directory $(REASONING_STAMP) \
	  || echo "reasoning-gym could not be installed: its test will be skipped"

$(LM_EVAL_STAMP): $(STAMP)
	@$(PIP_INSTALL) 'lm-eval[api]'
	@touch $@

$(REASONING_STAMP): $(STAMP)
	@$(PIP_INSTALL) -e '.[reasoning]'
	@touch $@

# Runs on Slurm are tested on a real one, made of processes of this machine; where it cannot be had, those tests are
# skipped and say so.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
slurm:
	@if ! command -v slurmctld >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing $(SLURM_PACKAGES)"; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES) >/dev/null; } \
	    || echo "Slurm could not be installed: its tests will be skipped"; \
	fi

# Code of models is confined by bubblewrap; where it cannot be had, its tests are skipped and say so. PyPI's package of that
# name is empty.
sandbox:
	@if ! command -v bwrap >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing bubblewrap"; \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null; } \
	    || echo "bubblewrap could not be installed: its tests will be skipped"; \
	fi

# Rules and alerts are tested with real Prometheus and Alertmanager; where they cannot be had, those tests are skipped and
# say so. Debian starts both as services when they are installed, which nobody asked for here.
OBSERVER_PACKAGES := prometheus prometheus-alertmanager
observers:
	@if ! command -v promtool prometheus-alertmanager >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing $(OBSERVER_PACKAGES)"; \
	  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 \
	    apt-get install -y -qq --no-install-recommends $(OBSERVER_PACKAGES) >/dev/null; } \
	    || echo "Prometheus could not be installed: its tests will be skipped"; \
	fi

# The runs of the demo live apart from yours, and each demo starts anew.
DEMO := CRATON_RUNS=runs/demo $(CRATON)
demo: $(TRAIN_STAMP)
	@rm -rf runs/demo; start=$$(date +%s); set -e; \
	say() { echo; echo "\$$ $$*"; }; \
	say "craton run examples/quickstart.yaml --stop-at 60% --chaos 'kill rank=1@step=120'"; \
	$(DEMO) run examples/quickstart.yaml --stop-at 60% --chaos 'kill rank=1@step=120'; \
	say "craton resume quickstart --cluster 'local x 1'"; \
	$(DEMO) resume quickstart --cluster 'local x 1'; \
	say craton ps; \
	$(DEMO) ps; \
	say craton export quickstart runs/demo/model; \
	$(DEMO) export quickstart runs/demo/model; \
	say "craton sample runs/demo/model --prompt 'class Test' --prompt 'def test_' --temperature 0.6"; \
	$(DEMO) sample runs/demo/model --prompt 'class Test' --prompt 'def test_' --max-tokens 60 --temperature 0.6; \
	echo; echo "the demo took $$(($$(date +%s) - start)) s; the run is runs/demo/quickstart, the model runs/demo/model"

lifecycle: $(TRAIN_STAMP)
	@$(VENV)/bin/python examples/lifecycle/lifecycle.py runs/lifecycle

plans: $(TRAIN_STAMP)
	@mkdir -p reports
	@for job in $(PLANNED_JOBS); do \
	  report=reports/$$(basename $$job .yaml).html; \
	  echo; echo "craton plan $$job --html $$report"; \
	  $(CRATON) plan $$job --html $$report || exit 1; \
	done
	@echo; echo "reports: $$(ls reports/*.html | tr '\n' ' ')"

test:
	@start=$$(date +%s); $(MAKE) --no-print-directory install browser slurm observers sandbox validators evaluators || exit 1; \
	installed=$$(date +%s); echo "set-up took $$((installed - start)) s"; \
	set -x; \
	$(VENV)/bin/ruff check --quiet . && $(VENV)/bin/ruff format --quiet --check . && \
	$(VENV)/bin/mypy --no-error-summary && $(VENV)/bin/lint-imports --no-logo || exit 1; \
	{ set +x; } 2>/dev/null; \
	echo "checks took $$(($$(date +%s) - installed)) s; now the tests"; \
	exec $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(PYTEST_FLAGS)

# `make test` keeps one case of each kind. These run here only, marked `slow`:
# - the same behaviour with another layout, size, tier, signal, schedule, alert severity or Slurm feature;
# - removed collectives: that a layout test fails without them, beyond one case for each kind of parallelism;
# - whole runs whose parts have tests of their own: from a job file to a sample by command (`make demo` does it too),
#   strangers dial every port of a run, a rank is killed in its last save, a stop outlasts its grace period, pods are
#   killed and drained, a webhook receives an alert, 200 clients stream, a queued run survives an upgrade;
# - scored benches: the diagnosis on all scenarios drawn from the date (`make test` has a sixth with a fixed seed), the
#   planner on every published run, 200 random ways to serve a model (`make test` has every pair of options on one rank),
#   plans of the largest examples, a plan for each of 15 clusters;
# - inference clients against a foreign server (`transformers serve`), and with random interruptions.
test-all:
	@seed=$${SEED:-$$(date +%s)}; \
	echo "property tests draw new cases with seed $$seed; 'make test-all SEED=$$seed' draws these again"; \
	$(MAKE) --no-print-directory test \
	  PYTEST_FLAGS="-m 'slow or not slow' --hypothesis-profile=drawn --hypothesis-seed=$$seed"

chaos: $(STAMP)
	$(VENV)/bin/python -m pytest -m 'slow or not slow' tests/recovery

# On a machine with a GPU, whose interpreter $(PYTHON) has torch and pytest; nothing is installed. PART= runs some only.
GPU_PARTS := graphs layouts recovery serving diagnosis checkpoints
test-gpu:
	@failed=; for part in $(or $(PART),$(GPU_PARTS)); do \
	  echo "part $$part"; \
	  $(PYTHON) -m pytest -p no:cacheprovider tests/gpu/test_gpu_$$part.py $(PYTEST_FLAGS) || failed="$$failed $$part"; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi; echo "passed: $(or $(PART),$(GPU_PARTS))"

bench: $(STAMP)
	$(CRATON) bench plan data/training_results.json

bench-grpo: $(STAMP)
	@$(VENV)/bin/python benchmarks/grpo.py runs/bench-grpo

bench-why: $(STAMP) slurm
	$(CRATON) bench why --live --healthy 100

clean:
	rm -rf $(VENV) .venv-aws reports runs .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
