"""Campaigns: files that are refused, cases that are drawn, faults in words and their exit codes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from hpctrain.core.errors import UsageError
from hpctrain.tools.chaos import campaign, case, oracle, regimes
from hpctrain.tools.chaos.case import Case, FailingFile, FullDisk, HostFault, LinkCall, Signal
from hpctrain.tools.chaos.draw import draw_case

PLAIN = {"engines": ["ring"], "ranks": [2, 3], "faults": {"kinds": ["kill-rank"]}}
EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "faults.toml"

# Changes of a campaign -> words of the refusal
REFUSED = {
    "no subject": ({"engines": []}, "needs engines = [...] or recipes = [...]"),
    "unknown engine": ({"engines": ["rnig"]}, "did you mean 'ring'"),
    "unknown kind": ({"faults": {"kinds": ["kill-ranks"]}}, "[faults] kinds.0: input should be"),
    "unknown key": ({"rank": [2]}, "unknown key in [campaign]: 'rank'; did you mean 'ranks'?"),
    "unknown key of faults": ({"faults": {"kinds": ["kill-rank"], "moment": ["step"]}},
        "unknown key in [faults]: 'moment'; did you mean 'moments'?"),
    "no faults": ({"faults": None}, "[faults] expected a table"),
    "ranks that do not fit": ({"ranks": [1]}, "none of [1] can train ring"),
    "hosts without a netlab": ({"faults": {"kinds": ["cut-link"]}},
        "cut-link: expected launchers = ['netlab']"),
    "disk": ({"faults": {"kinds": ["full-disk"], "disk_kib": [9]}},
        "faults.disk_kib: expected [smallest, largest], seen [9]"),
    "no such recipe": ({"engines": [], "recipes": ["none.toml"]}, "none.toml: expected a file"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_campaign_is_refused(name, tmp_path):
    changes, message = REFUSED[name]
    with pytest.raises(UsageError) as error:
        campaign.make("test", {**PLAIN, **changes}, tmp_path)
    assert message in str(error.value)


def test_a_file_without_schema_is_refused(tmp_path):
    (tmp_path / "faults.toml").write_text('engines = ["ring"]')
    with pytest.raises(UsageError, match="expected 'schema = 1'"):
        campaign.load(tmp_path / "faults.toml")


def drawn(**changes) -> list[Case]:
    """Return 200 cases of the plain campaign with `changes`."""
    test = campaign.make("test", {**PLAIN, **changes})
    return [draw_case(test, index) for index in range(200)]


def faults_of(cases: list[Case]) -> list[case.Fault]:
    return [fault for item in cases for fault in item.faults]


# Changes of a campaign -> the kinds in words that its cases have
DRAWN = {
    "a rank": ({}, {"SIGKILL to rank at step"}),
    "two at once": ({"faults": {"kinds": ["kill-two"]}, "ranks": [3]},
        {"SIGKILL to 2 ranks at step"}),
    "moments": ({"faults": {"kinds": ["stop-rank"], "moments": ["checkpoint", "start"]}},
        {"SIGSTOP to rank at checkpoint", "SIGSTOP to rank at start"}),
    "resumes": ({"faults": {"kinds": ["kill-rank"], "count": [2], "moments": ["recovery"]}},
        {"SIGKILL to rank at step", "SIGKILL to rank at recovery"}),
    "elastic": ({"launchers": ["elastic"], "spares": [1],
                 "faults": {"kinds": ["kill-rank"], "count": [3], "moments": ["recovery"]}},
        {"SIGKILL to rank at step", "SIGKILL to rank at recovery"}),
    "threads": ({"launchers": ["threads"], "faults": {"kinds": ["kill-rank", "stop-rank"],
                 "count": [2], "moments": ["step", "recovery"]}},
        {"kill of rank in a call", "kill of rank in a call during recovery"}),
    "launcher": ({"faults": {"kinds": ["kill-launcher"]}},
        {"SIGKILL to launcher at step", "SIGKILL to launcher at start"}),
    "hosts": ({"launchers": ["netlab"],
               "faults": {"kinds": ["cut-link", "slow-link", "dead-host"]}},
        {"link cut", "link slowed", "host dead"}),
    "disk": ({"faults": {"kinds": ["full-disk"]}}, {"full disk"}),
    "nothing": ({"faults": {"kinds": ["kill-two"]}, "ranks": [2]}, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_the_kinds_of_faults_that_are_drawn(name):
    changes, expected = DRAWN[name]
    cases = drawn(**changes)
    assert {case.describe_kind(fault) for fault in faults_of(cases)} == expected
    assert {item.ranks for item in cases} == set(changes.get("ranks", PLAIN["ranks"]))
    assert [case.read(json.dumps(asdict(item))) for item in cases] == cases


def test_a_case_has_one_fault_unless_a_count_is_given():
    assert {len(item.faults) for item in drawn()} == {1}


def test_the_first_fault_of_a_case_is_never_during_a_recovery():
    faults = {"kinds": ["kill-rank"], "count": [1, 3], "moments": ["recovery"]}
    cases = drawn(launchers=["elastic"], faults=faults)
    assert {item.faults[0].during for item in cases} == {"step"}


def test_periodic_faults_follow_each_other():
    faults = {"kinds": ["kill-rank"], "count": [4], "period_s": 5.0}
    for item in drawn(launchers=["elastic"], faults=faults):
        assert [fault.delay_ms for fault in item.faults] == [5000, 10000, 15000, 20000]


def test_a_users_recipe_gets_its_number_of_steps(tmp_path):
    (tmp_path / "own.toml").write_text('extends = "digits"\n[run]\nepochs = 2\n')
    table = {**PLAIN, "engines": [], "recipes": ["own.toml"], "set": ["optimizer.batch=100"]}
    item = draw_case(campaign.make("test", table, tmp_path), 0)
    steps_per_epoch = -(-item.epoch_samples // 100)
    assert (item.batch, item.steps) == (100, 2 * steps_per_epoch)
    assert item.samples_of(item.steps) == 2 * item.epoch_samples
    assert "epochs" not in item.recipe["run"]


def test_a_batch_per_rank_has_the_number_of_steps_of_one_rank():
    settings = ["optimizer.batch_per_rank=100", "run.epochs=2"]
    item = drawn(engines=[], recipes=["digits"], set=settings)[0]
    assert item.batch == 100 * item.ranks
    assert item.steps == 2 * -(-item.epoch_samples // 100)


def test_the_example_of_the_docs_is_a_campaign():
    test = campaign.load(EXAMPLE)
    assert draw_case(test, 0).engine == test.options.recipes[0]


def a_case(launcher: str, *faults: case.Fault, spares: int = 0) -> Case:
    recipe = regimes.make_recipe("ring", 0)
    return Case(0, 0, 3, "ring", recipe, launcher, list(faults), spares)


KILL, STOP = Signal("SIGKILL", 1, 9, 2.0), Signal("SIGSTOP", 1, 9, 2.0)
KILL_TWO = Signal("SIGKILL", 1, 9, 2.0, others=[0])
TORN = FailingFile(0, "write", 4, "torn", stays=False)
# A case -> its faults in words, the exit codes that are allowed
CASES = {
    "none": (a_case("launch"), "no faults", {0}),
    "kill": (a_case("launch", KILL), "SIGKILL to rank 1 at step 9 + 2 ms", {0, 1}),
    "kill, elastic": (a_case("elastic", KILL), "SIGKILL to rank 1 at step 9 + 2 ms", {0}),
    "all of an elastic job": (a_case("elastic", KILL, KILL_TWO),
        "SIGKILL to rank 1 at step 9 + 2 ms; SIGKILL to rank 1 and 0 at step 9 + 2 ms", {0, 1}),
    "all that trained": (a_case("elastic", KILL, KILL_TWO, spares=1),
        "SIGKILL to rank 1 at step 9 + 2 ms; SIGKILL to rank 1 and 0 at step 9 + 2 ms", {0, 1}),
    "two of them": (a_case("elastic", KILL_TWO), "SIGKILL to rank 1 and 0 at step 9 + 2 ms", {0}),
    "stop": (a_case("launch", STOP), "SIGSTOP to rank 1 at step 9 + 2 ms", {0, 86}),
    "orphans": (a_case("launch", Signal("SIGKILL", -1, None, 300)),
        "SIGKILL to the launcher at the start + 300 ms", {-9, 0}),
    "Ctrl-C twice": (a_case("launch", Signal("SIGINT", -1, 5, 1, 2)),
        "SIGINT 2 times to the launcher at step 5 + 1 ms", {0, 75, 130}),
    "disk": (a_case("launch", FullDisk(64)), "disk of 64 KiB", {0, 1, 2}),
    "torn write": (a_case("launch", TORN), "torn at write 4 of rank 0", {0, 1}),
    "threads": (a_case("threads", LinkCall(1, 0.5), LinkCall(2, 0.5, 7)),
        "kill in call 50.00 % of rank 1; kill in call 50.00 % + 7 of rank 2", {0}),
    "slow link": (a_case("netlab", HostFault("slow", 1, 9, 1)),
        "link slowed of rank 1 at step 9 + 1 ms", {0}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_faults_in_words_and_their_exit_codes(name):
    item, words, codes = CASES[name]
    assert case.describe_case(item).partition(": ")[2] == words
    assert oracle.allowed_codes(item, item.faults) == codes


# A recipe's tables -> deterministic, ordered, with state that no other rank holds
PROMISES = {
    "ring": (True, False, False), "ordered": (True, True, False), "shards": (True, False, True),
    "top-k": (True, False, True), "bf16": (True, False, True), "priority": (True, False, True),
    "ps-sync": (True, False, True), "easgd": (False, False, True),
    "ps-sync, backup": (False, False, True), "gossip, ring": (True, False, True),
    "gossip": (False, False, True), "ps-async": (False, False, True),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMISES)
def test_promises_by_recipe(name):
    recipe = regimes.make_recipe(name, 0)
    promises = (regimes.is_deterministic, regimes.is_ordered, regimes.has_shards)
    assert tuple(promise(recipe) for promise in promises) == PROMISES[name]


@pytest.mark.parametrize("table", [{}, {"ranks": 2}, {"faults": [{"kind": "none"}]}])
def test_a_line_that_is_no_case_is_refused(table):
    with pytest.raises(UsageError, match="expected a case"):
        case.read(json.dumps(table))
