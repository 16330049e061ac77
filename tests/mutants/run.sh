#!/bin/sh
# `make mutants`: record the rows of `make test` in a clone of the commit, then plant the errors there.
# An interrupted run goes on where it was; remove .reports-mutants/ to begin anew.
set -e
cd "$(dirname "$0")/../.."
work=$PWD/.reports-mutants
if ! [ -d "$work/tree" ]; then
    git clone -q . "$work/tree"
fi
if ! [ -e "$work/recorded" ]; then
    rm -rf "$work/record" && mkdir "$work/record"
    PYTHONPATH=$PWD/tests/mutants:$PWD/tests/mutants/children RECORD=$work/record PYTEST_ADDOPTS='-p record' \
        make -C "$work/tree" test
    touch "$work/recorded"
fi
.venv-openmpi/bin/python tests/mutants/run.py --tree "$work/tree" --record "$work/record" \
    --table tests/mutants/test.jsonl
