# The two commands: `make quickstart` trains a model, `make test` checks april. Both set up .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTHON3_12 ?= $(shell command -v python3.12 || ls -d $(HOME)/.pyenv/versions/3.12.*/bin/python3.12 2> /dev/null | tail -1)
VENV := .venv
BIN := $(VENV)/bin
# Numeric libraries spin when they share cores with each other; one thread a test process is fastest and repeatable.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: help setup quickstart test test-units test-wheel test-servers test-shared-servers test-ranks test-cluster test-shared-cluster test-trl test-trl-suite test-trl-colocate test-verl test-openrlhf test-skyrl test-areal test-slime test-megatron test-mutations test-crash-points test-trackers test-environments test-clients test-verifiers test-nemo-gym \
	gpu lint format docs clean

help:
	@echo "make quickstart    set up .venv and train with active partial rollouts, into runs/quickstart"
	@echo "make test          set up .venv, lint, type-check and test"
	@echo "make test-units    only test, against no real server"
	@echo "make test-wheel    build sdist and wheel, and use the wheel in an environment with nothing else"
	@echo "make test-servers  test against real vLLM and SGLang servers, which it sets up first"
	@echo "make test-shared-servers  test real servers on the trainer's devices, with servers and runs that are killed"
	@echo "make test-ranks    test training on up to four ranks, and ranks that are lost, at length"
	@echo "make test-cluster  test engines on the nodes of a real Ray cluster, which it sets up first"
	@echo "make test-shared-cluster  test engines on the devices of ranks on a Ray cluster, with vLLM and with parts that are killed"
	@echo "make test-trl      test the integration in TRL with every setting that it takes, which it sets up first"
	@echo "make test-trl-suite TRL=PATH  run TRL's own tests of its trainer, in a checkout of TRL, on april's, and its examples"
	@echo "make test-trl-colocate  test TRL's vllm_mode = colocate on vLLM, which it sets up first"
	@echo "make test-verl     test the integration in verl, which it sets up first"
	@echo "make test-openrlhf test the integration in OpenRLHF, which it sets up first"
	@echo "make test-skyrl    test the integration in SkyRL (Python 3.12), which it sets up first"
	@echo "make test-areal    test the integration in AReaL, which it sets up first"
	@echo "make test-slime    test the integration in slime, on a real SGLang server, which it sets up first"
	@echo "make test-megatron test training by Megatron (Python 3.12), which it sets up first"
	@echo "make gpu           everything that needs a GPU, on one, in ten minutes, into benchmarks/gpu.json"
	@echo "make test-environments  test the adapters of GEM, skyrl-gym, gymnasium and OpenEnv, which it sets up first"
	@echo "make test-clients  test programs of seven clients of model APIs against the gateway, which it sets up first"
	@echo "make test-verifiers  test environments of verifiers, which it sets up first"
	@echo "make test-nemo-gym   test servers of NeMo Gym (Python 3.12), which it sets up first"
	@echo "make test-mutations  run april train on 600 damaged recipes, data files, templates and model folders"
	@echo "make test-crash-points  kill a run at every durable write, in five ways, and resume it"
	@echo "make test-trackers test wandb, trackio and MLflow, which it sets up first"
	@echo "make docs          build the documentation's site, into build/site"
	@echo "make lint          ruff, mypy and the import contract only"

# constraints.txt is the tested lock. It pins torch's CPU build; see the comment in it for machines without one at hand.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[dev]"
	touch $@

setup: $(VENV)/.installed

quickstart: setup
	HF_HUB_OFFLINE=1 $(BIN)/april train examples/gcd/recipe.toml --output runs/quickstart --if-exists rename

test: lint docs test-wheel test-units

test-units: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests --ignore=tests/servers --ignore=tests/ranks/slow

test-wheel: setup
	PYTHON=$(PYTHON) scripts/test_wheel.sh

# Sets up an environment for each server first, under .servers (scripts/setup_*.sh).
test-servers: setup
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 tests/servers

# As test-servers; servers and april are killed in every state of a turn, so it takes half an hour.
test-shared-servers: setup
	$(TEST_ENV) $(BIN)/python -m pytest -m "slow or not slow" tests/servers/test_shared.py

test-ranks: setup
	$(TEST_ENV) $(BIN)/python -m pytest tests/ranks

# Sets up an environment of its own first, under .frameworks: nothing else of april's needs Ray.
test-cluster:
	PYTHON=$(PYTHON) scripts/setup_cluster.sh
	$(TEST_ENV) .frameworks/cluster/bin/python -m pytest tests/cluster

# As test-cluster; a run with vLLM on the ranks' devices is killed in parts, which takes ten minutes or more.
test-shared-cluster:
	PYTHON=$(PYTHON) scripts/setup_cluster.sh
	PYTHON=$(PYTHON) scripts/setup_vllm.sh
	$(TEST_ENV) .frameworks/cluster/bin/python -m pytest -m "slow or not slow" tests/cluster/test_shared.py

# In an environment of its own, too: april's, and DeepSpeed.
test-trl:
	PYTHON=$(PYTHON) scripts/setup_trl.sh
	$(TEST_ENV) .frameworks/trl/bin/python -m pytest -m "slow or not slow" tests/integrations/trl

# In test-trl's environment: TRL's own tests of its trainer, and four of its example scripts, in TRL=PATH, a checkout of the
# release that is installed. Models and data sets are made on the spot. tests/integrations/trl/suite/differences.py names the
# tests that april refuses.
test-trl-suite: export PYTHONPATH := $(CURDIR)/tests/integrations/trl/suite
test-trl-suite:
	@test -f "$(TRL)/tests/test_grpo_trainer.py" || { echo "TRL=PATH: pass the path of a checkout of TRL"; exit 1; }
	PYTHON=$(PYTHON) scripts/setup_trl.sh
	$(TEST_ENV) PYTHONDONTWRITEBYTECODE=1 .frameworks/trl/bin/python -m pytest -p on_april -p no:cacheprovider -rfExs \
		-c "$(abspath $(TRL))/pyproject.toml" $(ARGS) "$(abspath $(TRL))/tests/test_grpo_trainer.py"
	APRIL_TRL_SOURCE="$(abspath $(TRL))" $(TEST_ENV) .frameworks/trl/bin/python -m pytest -m "slow or not slow" \
		tests/integrations/trl/test_examples.py

# As TRL's, with vLLM in the place of DeepSpeed. Other tests of this mode use a stand-in for vLLM.
test-trl-colocate:
	PYTHON=$(PYTHON) scripts/setup_trl_colocate.sh
	$(TEST_ENV) .frameworks/trl-colocate/bin/python -m pytest tests/integrations/trl/test_colocate.py

# Sets up an environment of its own first, under .frameworks: verl needs older transformers than april is tested with. One
# test has a real SGLang server, one vLLM's engine.
test-verl:
	PYTHON=$(PYTHON) scripts/setup_verl.sh
	PYTHON=$(PYTHON) scripts/setup_sglang.sh
	PYTHON=$(PYTHON) scripts/setup_vllm.sh
	$(TEST_ENV) .frameworks/verl/bin/python -m pytest tests/integrations/verl tests/servers/test_verl.py tests/servers/test_verl_images.py

# Sets up an environment of its own first, too, without what of OpenRLHF needs CUDA.
test-openrlhf:
	PYTHON=$(PYTHON) scripts/setup_openrlhf.sh
	$(TEST_ENV) .frameworks/openrlhf/bin/python -m pytest tests/integrations/openrlhf

# As OpenRLHF's. SkyRL wants Python 3.12. One test has a real vLLM server.
test-skyrl:
	PYTHON=$(PYTHON3_12) scripts/setup_skyrl.sh
	PYTHON=$(PYTHON) scripts/setup_vllm.sh
	$(TEST_ENV) .frameworks/skyrl/bin/python -m pytest tests/integrations/skyrl tests/servers/test_skyrl.py

# As OpenRLHF's. One test has a real SGLang server. AReaL's examples are not in its package: from its source, which
# APRIL_AREAL_SOURCE names or the script gets.
test-areal: export APRIL_AREAL_SOURCE ?= $(CURDIR)/.frameworks/areal-source
test-areal:
	PYTHON=$(PYTHON) scripts/setup_areal.sh
	PYTHON=$(PYTHON) scripts/setup_sglang.sh
	$(TEST_ENV) .frameworks/areal/bin/python -m pytest tests/integrations/areal tests/servers/test_areal.py

# As OpenRLHF's. slime is on no package index: from its source, which APRIL_SLIME_SOURCE names or the script gets.
test-slime: export APRIL_SLIME_SOURCE ?= $(CURDIR)/.frameworks/slime-source
test-slime:
	PYTHON=$(PYTHON) scripts/setup_slime.sh
	PYTHON=$(PYTHON) scripts/setup_sglang.sh
	$(TEST_ENV) .frameworks/slime/bin/python -m pytest tests/integrations/slime tests/servers/test_slime.py tests/servers/test_slime_functions.py tests/servers/test_slime_scripts.py tests/servers/test_slime_images.py

# As OpenRLHF's. Megatron-Bridge wants Python 3.12.
test-megatron:
	PYTHON=$(PYTHON3_12) scripts/setup_megatron.sh
	$(TEST_ENV) .frameworks/megatron/bin/python -m pytest tests/integrations/test_megatron.py

# Takes the environment that is active: torch's build for the GPU at hand is not april's to choose.
gpu:
	$(PYTHON) benchmarks/gpu.py

# Sets up an environment of its own first, under .frameworks: the packages pin older versions of what april is tested with.
test-environments:
	PYTHON=$(PYTHON) scripts/setup_environments.sh
	$(TEST_ENV) .frameworks/environments/bin/python -m pytest tests/environments/test_adapters.py tests/environments/test_openenv_server.py

# Harnesses of verifiers are scripts that its tool uv prepares with packages of the index.
test-verifiers:
	PYTHON=$(PYTHON) scripts/setup_verifiers.sh
	PATH=$(CURDIR)/.frameworks/verifiers/bin:$(PATH) $(TEST_ENV) .frameworks/verifiers/bin/python -m pytest -m "slow or not slow" tests/gateway/test_verifiers.py

# The servers have an environment of their own; april's tests talk to them over HTTP.
test-nemo-gym: setup
	PYTHON=$(PYTHON3_12) scripts/setup_nemo_gym.sh
	$(TEST_ENV) $(BIN)/python -m pytest -m "slow or not slow" tests/gateway/test_nemo_gym.py

# The results are in benchmarks/clients.json, and in the guide's table (scripts/client_table.py).
test-clients:
	PYTHON=$(PYTHON) scripts/setup_clients.sh
	APRIL_CLIENTS=benchmarks/clients.json $(TEST_ENV) .frameworks/clients/bin/python -m pytest -m "slow or not slow" tests/gateway tests/rendering
	$(PYTHON) scripts/client_table.py

# The counts of how the runs ended are in benchmarks/mutations.json. The examples are one test, without a time limit.
test-mutations: setup
	APRIL_MUTATIONS=600 APRIL_MUTATION_COUNTS=benchmarks/mutations.json $(TEST_ENV) $(BIN)/python -m pytest -o faulthandler_timeout=0 tests/test_mutations.py

# `make test-units` tries a share of the points.
test-crash-points: setup
	$(TEST_ENV) $(BIN)/python -m tests.crash_points
	$(TEST_ENV) $(BIN)/python -m tests.crash_points --kind episodes --modes kill power
	$(TEST_ENV) $(BIN)/python -m tests.crash_points --kind mixture --modes kill power
	$(TEST_ENV) $(BIN)/python -m tests.crash_points --kind images --modes kill power

# In an environment of their own, under .frameworks: nothing else of april's needs them.
test-trackers:
	PYTHON=$(PYTHON) scripts/setup_trackers.sh
	$(TEST_ENV) .frameworks/trackers/bin/python -m pytest tests/reporting/test_trackers.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Fails on a broken link, a missing page and a name that is not there.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
