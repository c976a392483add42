# Everything a contributor runs. `make` alone explains the targets.

# `.venv` is of the Python that made it. One of another version has an environment of its own beside
# it, such as .venv-3.13, so that versions do not disturb each other.
ifdef PYTHON
VERSION_OF = $(shell $(1) -c 'import sys; print("%d.%d%s" % (*sys.version_info[:2], sys.abiflags))' 2>/dev/null)
PYTHON_VERSION := $(call VERSION_OF,'$(PYTHON)')
VENV := .venv$(patsubst %,-%,$(filter-out $(or $(call VERSION_OF,.venv/bin/python),$(PYTHON_VERSION)),$(PYTHON_VERSION)))
else
PYTHON := python3
VENV := .venv
endif
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# An environment whose Python has gone, as after an upgrade of the system, is made again.
$(shell [ -x '$(BIN)/python' ] || rm -f '$(STAMP)')
ARCHIVE := $(VENV)/spark.jsa
SEEDS ?= 2000
SEEDS_MAX ?= 3000
SECONDS ?= 600
HOURS ?= 2
HISTORIES ?= 1000
WORKERS ?= 5
SPARK_VERSIONS ?= 4.1 4.2 4.3
SPARK_VENVS := .venv-spark
LOWEST := .venv-lowest
RELEASE := .venv-release
PYTHONS ?= 3.11 3.12 3.13 3.14
ONLY ?=
CONNECTOR ?=
ARGS ?=

JAVA_HINT := install it, for example: apt-get install default-jre-headless
PYTHON_HINT := install it, for example: apt-get install python3 python3-venv

# In these Python 3.11 and Java cannot read the name of a folder that has other than ASCII letters.
ifneq ($(filter C POSIX,$(LC_ALL)),)
export LC_ALL := C.UTF-8
endif

.DEFAULT_GOAL := help
.SHELLFLAGS := -eu -c
.PHONY: help install demo test test-spark-matrix test-pythons test-elsewhere test-lowest test-upgrade coverage prove check lint types layers sim model mutants chaos chaos-spark soak blackbox abuse fuzz bench bench-peers trace pages docs site proto proto-check sync sync-check release-check release requirements clean

##@ Use

help: ## Explain every target.
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Make .venv and install dlog in it, editable, with all tools. Fast the second time.

demo: $(STAMP) ## Run the main job on real data: cluster, write, stream, kill a bookie, compare. ARGS=--secure.
	@$(BIN)/python -m demo.main $(ARGS)

##@ Prove

# More workers than cores: many tests wait for processes, sessions and time-outs.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS)

test: WORKERS = 6
test: $(ARCHIVE) ## Run the tests, of long sweeps a sample, on WORKERS=n. ARGS="-k name" goes to pytest.
	@$(PYTEST) $(ARGS)

# What a version of PySpark may do otherwise; each has an environment of its own, which keeps the newest
# release of the version.
SPARK_CORE = $(addprefix tests/spark/test_,batch_read.py batch_write.py pushdown.py overwrite.py errors.py \
	limited_streams.py stream_shapes.py many_targets.py progress.py workers.py threads.py tls.py endpoint.py) \
	tests/dlspark/test_stream.py
# At full length: all types, each kind of table, what truncation leaves, and each way in which a sink fails.
SPARK_WHOLE = $(addprefix tests/spark/test_,sql.py typed_logs.py stateful_streams.py stream_read.py stream_write.py foreach_batch.py)
# PySpark 4.1 tells a source of no limits: it lacks the words in which these tests ask.
SPARK_LIMITS = $(addprefix tests/dlspark/test_,stream_limits.py available_now.py)
# PySpark 4.1 leaves sockets for the garbage collector to close.
SPARK_WARNINGS = -W default::ResourceWarning -W default::pytest.PytestUnraisableExceptionWarning
test-spark-matrix: $(SPARK_VERSIONS:%=$(SPARK_VENVS)/%/.installed) ## Run the connector's core on SPARK_VERSIONS="4.1 4.2 4.3".
	@for version in $(SPARK_VERSIONS); do \
		python=$(SPARK_VENVS)/$$version/bin/python; \
		$$python -c 'import pyspark; print("== PySpark", pyspark.__version__)'; \
		limits=$(SPARK_LIMITS); [ "$$version" != 4.1 ] || limits=; \
		$$python -m pytest -q -n 0 $(SPARK_WARNINGS) $(SPARK_CORE) $$limits $(ARGS); \
		$$python -m pytest -q -n 0 --full $(SPARK_WARNINGS) $(SPARK_WHOLE) $(ARGS); \
	done

# Those that are neither on the PATH nor in pyenv's folders run in Debian roots, which root can make.
test-pythons: $(STAMP) ## Run demo and tests on PYTHONS="3.11 3.12 3.13 3.14". ARGS="--work test".
	@$(BIN)/python -m tests.elsewhere pythons $(PYTHONS:%=--only %) $(ARGS)

test-elsewhere: $(ARCHIVE) ## Run them in each place of tests/elsewhere/places.py. ARGS="--list".
	@$(BIN)/python -m tests.elsewhere places $(ARGS)

# What PySpark 4.1 cannot do, which the matrix runs with later versions; and bugs that those tests find.
test-lowest: $(LOWEST)/.installed ## Run the tests with the lowest versions that pyproject.toml allows.
	@$(LOWEST)/bin/python -m pytest -n $(WORKERS) $(SPARK_WARNINGS) $(SPARK_LIMITS:%=--ignore=%) \
		--ignore=tests/simulation/test_mutants.py $(ARGS)

test-upgrade: $(ARCHIVE) ## Run the last release and this one in one cluster, forwards and back. Needs git's history.
	@$(BIN)/python -m pytest -q -n 0 --full tests/upgrade $(ARGS)

coverage: $(ARCHIVE) ## Run the tests; fail unless they ran the pure modules and most else. ARGS=--full for all.
	@$(PYTEST) --cov --cov-report= $(ARGS)
	@$(BIN)/python -m tests.coverage_check

prove: $(STAMP) ## Run all tests and searches at full length, one after the other, and sum up.
	@status=0; sums=; \
	for proof in coverage test-pythons test-elsewhere test-lowest model sim mutants chaos chaos-spark blackbox; do \
		if [ $$proof = blackbox ] && ! command -v go >/dev/null; then \
			sums="$$sums$$(printf '%-12s left out: go is not installed' $$proof);"; continue; fi; \
		echo "== make $$proof"; began=$$(date +%s); arguments=; \
		[ $$proof != coverage ] || arguments='ARGS=--full --timeout=1800'; \
		if $(MAKE) --no-print-directory $$proof $${arguments:+"$$arguments"}; then ended=passed; else ended=FAILED; status=1; fi; \
		sums="$$sums$$(printf '%-12s %s after %d s' $$proof $$ended $$(($$(date +%s) - began)));"; \
	done; \
	echo "$$sums" | tr ';' '\n'; exit $$status

check: lint types layers proto-check sync-check test ## Run all static checks, then all tests.

lint: $(STAMP) ## Check rules and format (ruff).
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP) ## Check types (mypy --strict).
	@$(BIN)/mypy

layers: $(STAMP) ## Check that no layer imports a higher one, and no pure module I/O (import-linter).
	@$(BIN)/lint-imports pyproject.toml tests/pure_modules.toml

sim: $(STAMP) ## Simulate schedules on all cores: SEEDS=n runs n seeds, SEED=n replays one.
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

model: $(STAMP) ## Visit all interleavings of fencing and recovery. ARGS="--only crash".
	@$(BIN)/python -m tests.model $(ARGS)

mutants: $(STAMP) ## Put known bugs back one at a time: a seed of the simulation or a test must catch each.
	@$(BIN)/python -m tests.simulation.mutants_run --seeds-max $(SEEDS_MAX) $(ARGS)

chaos: $(STAMP) ## Break real processes, links and disks for SECONDS=n; SEED=n repeats a plan. ARGS="--secure --mixed".
	@$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

chaos-spark: $(STAMP) ## Kill Spark's processes and bookies, cut hosts off, for SECONDS=n; SEED=n. ARGS=--secure.
	@$(BIN)/python -m tests.chaos_spark --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

soak: $(STAMP) ## Run all of it secured for HOURS=n, with faults and restarts; nothing may grow. ARGS="--out dir".
	@$(BIN)/python -m tests.soak --hours $(HOURS) $(if $(SEED),--seed $(SEED)) $(ARGS)

blackbox: $(STAMP) ## Check HISTORIES=n of clients in Go and Java under faults by a model; SEED=n. Needs Go.
	@$(BIN)/python -m tests.blackbox --histories $(HISTORIES) $(if $(SEED),--seed $(SEED)) $(ARGS)

abuse: $(STAMP) ## Measure what hostile clients cost: ARGS="--only ping --seconds 20".
	@$(BIN)/python -m tests.abuse $(ARGS)

fuzz: $(STAMP) ## Feed both ends of the wire with what atheris finds, for SECONDS=n.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group fuzz
	@$(BIN)/python -m tests.dlcore.wire.fuzz -max_total_time=$(SECONDS) $(ARGS)

bench: $(STAMP) ## Measure each figure beside its limit; ONLY=core_write runs one.
	@$(BIN)/python -m benchmarks.main $(if $(ONLY),--only $(ONLY)) $(ARGS)

# CONNECTOR=4.2.0 chooses another version of Spark's connector to Kafka than that of PySpark.
bench-peers: $(STAMP) ## Measure the same work beside a Kafka, which Maven brings; CONNECTOR=4.2.0.
	@CONNECTOR=$(CONNECTOR) $(BIN)/python -m benchmarks.main --only peers $(ARGS)

trace: $(STAMP) ## Show which modules a record passes, and counts of the code, beside their aims.
	@$(BIN)/python -m tools.trace $(ARGS)

##@ Maintain

PROTO_FILES = $(wildcard dlcore/base/proto/*.proto)
PROTOC = $(BIN)/python -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc

# Only bookie.proto declares a service.
define generate_proto
	$(PROTOC) --python_out="$(1)" --mypy_out="quiet:$(1)" $(PROTO_FILES)
	$(PROTOC) --grpc_python_out="$(1)" --mypy_grpc_out="quiet:$(1)" dlcore/base/proto/bookie.proto
endef

proto: $(STAMP) ## Generate dlcore/base/proto/*_pb2* from the .proto files.
	@$(call generate_proto,.)

pages: $(STAMP) ## Generate the pages, tables of pages and dashboards that come from the code.
	@$(BIN)/python -m tests.fixtures.configuration_page > docs/configuration.md.new
	@mv docs/configuration.md.new docs/configuration.md
	@$(BIN)/python -m tests.fixtures.machines_page > docs/architecture/machines.md.new
	@mv docs/architecture/machines.md.new docs/architecture/machines.md
	@$(BIN)/python -m tests.flight_document
	@$(BIN)/python -m tests.entrances_document
	@$(BIN)/python -m tests.backends_document
	@$(BIN)/python -m tests.spark_document
	@$(BIN)/python -m tests.metrics_document
	@$(BIN)/python -m tests.dashboards_document
	@for page in commands errors api figures; do $(BIN)/python -m tests.$${page}_document; done

docs: pages ## Generate pages of the code, run notebooks that changed (ARGS=--all: all), build the site.
	@$(BIN)/python -m tools.site.notebooks $(ARGS)
	@$(MAKE) --no-print-directory site

site: $(STAMP) ## Build the documentation site of the pages as they are; a link that leads nowhere fails.
	@$(BIN)/python -m tools.site

proto-check: $(STAMP) ## Check that the generated files are those of the .proto files.
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(MAKE) --no-print-directory --silent proto-into FOLDER="$$folder"; \
	for file in "$$folder"/dlcore/base/proto/*; do \
		diff -u "dlcore/base/proto/$${file##*/}" "$$file" || \
			{ echo "error: dlcore/base/proto/$${file##*/} is stale; run: make proto" >&2; exit 1; }; \
	done

.PHONY: proto-into
proto-into:
	@$(call generate_proto,$(FOLDER))

sync: $(STAMP) ## Generate the blocking calls of dlcore/sync from the async classes.
	@$(BIN)/python -m tools.make_sync

sync-check: $(STAMP) ## Check that the blocking calls are those of the async classes.
	@$(BIN)/python -m tools.make_sync --check

# With ARGS=--without-audit where the service of pip-audit cannot be reached.
release-check: $(RELEASE)/.installed ## Build twice, list the parts, ask for known weaknesses. ARGS="--out dist".
	@$(RELEASE)/bin/python -m tools.release_check $(ARGS)

release: $(RELEASE)/.installed ## Commit, check and tag a release: VERSION=0.2.0. Publishes nothing.
	@$(RELEASE)/bin/python -m tools.release '$(VERSION)' $(ARGS)

clean: ## Remove the virtual environments, caches and built files.
	rm -rf .venv .venv-* .debian build dist artifacts spark-warehouse metastore_db derby.log benchmarks/results.json \
		.mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

requirements:
	@command -v '$(PYTHON)' >/dev/null || \
		{ echo "error: $(PYTHON) not found; dlog needs Python 3.11 or later; $(PYTHON_HINT)" >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is $$('$(PYTHON)' -V); dlog needs Python 3.11 or later;" \
			"make PYTHON=/path/to/python3.11 chooses another one" >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) cannot make virtual environments; $(PYTHON_HINT)" >&2; exit 1; }
	@java="$${JAVA_HOME:+$$JAVA_HOME/bin/}java"; command -v "$$java" >/dev/null || \
		{ echo "error: $$java not found; dlog needs Java 17 or later; $(JAVA_HINT)" >&2; exit 1; }; \
	major=$$("$$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1); \
	[ "$${major:-0}" -ge 17 ] || \
		{ echo "error: $$java is version $${major:-unknown}; dlog needs Java 17 or later; $(JAVA_HINT)" >&2; exit 1; }

# --group needs pip 25.1.
$(STAMP): pyproject.toml | requirements
	@[ -x $(BIN)/python ] || '$(PYTHON)' -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@echo "installing dlog and its tools into $(VENV) (PySpark is large: this takes a few minutes once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cli,spark]' --group dev
	@touch $(STAMP)

$(ARCHIVE): $(STAMP)
	@echo "preparing the tests, once: compiling them, noting which classes Spark and ZooKeeper load"
	@$(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1 & \
	$(BIN)/python -m tests.fixtures.java >$@.log 2>&1 || { cat $@.log; exit 1; }; \
	wait

# Only uv resolves to the lowest versions.
$(LOWEST)/.installed: pyproject.toml | requirements
	@[ -x $(@D)/bin/python ] || '$(PYTHON)' -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
	@echo "installing the lowest versions into $(@D)"
	@$(@D)/bin/python -m uv pip install --quiet --resolution lowest-direct --editable '.[cli,spark]' --group test --group demo
	@touch $@

$(RELEASE)/.installed: pyproject.toml | requirements
	@[ -x $(@D)/bin/python ] || '$(PYTHON)' -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --group release
	@touch $@

$(SPARK_VENVS)/%/.installed: pyproject.toml | requirements
	@[ -x $(@D)/bin/python ] || '$(PYTHON)' -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@echo "installing PySpark $* into $(@D)"
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[cli,spark]' --group test 'pyspark==$*.*'
	@touch $@
