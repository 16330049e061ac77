"""What a run of a pipeline shows: the line at its start, trace, rows, summary, memory, report."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from ranks import run_on

from hpctrain.parallel.schedules import make
from hpctrain.parallel.schedules.actions import Action
from hpctrain.parallel.timing.clock import StageCosts, uniform_costs
from hpctrain.parallel.timing.summary import describe_bubble
from hpctrain.tools.report import page, pipeline
from hpctrain.tools.report.record import read
from hpctrain.training import pipeline_facts, recipe, runs
from hpctrain.training.dry_run import dry_run

SMALL = ["model.widths=[64,32,32,32,10]", "run.epochs=1", "mesh.pipe=2"]
#: settings, and the stages of the two ranks of a replica
RUNS = {
    "1f1b": (["pipeline.schedule=1f1b"], [[0], [1]]),
    "zb-v": (["pipeline.schedule=zb-v"], [[0, 3], [1, 2]]),
    "by hand": (["pipeline.balance=[6,5]"], [[0], [1]]),
    "even": (["pipeline.balance=even"], [[0], [1]]),
    "ordered": (["wire.reduction=ordered", "wire.blocks=2"], [[0], [1]]),
}
MICRO_BATCHES = 4


def load(*changes: str):
    return recipe.load("digits", [*SMALL, f"optimizer.micro_batches={MICRO_BATCHES}", *changes])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function of a name of RUNS that returns the folder of a traced run on 2 x 2."""

    @cache
    def train(name: str) -> Path:
        out = tmp_path_factory.mktemp(name.replace(" ", "-")) / "run"
        spec = load("trace.enabled=true", *RUNS[name][0])
        run_on("threads", 4, lambda world: runs.train(spec, world, out, resume=False))
        return out

    return train


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_the_summary_has_the_grid_the_schedule_and_idle_times(trained, name):
    mesh = summary_of(trained(name))["mesh"]
    _, stages = RUNS[name]
    assert (mesh["data"], mesh["pipe"], mesh["micro_batches"]) == (2, 2, MICRO_BATCHES)
    assert mesh["ranks"] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [pipeline.rank_label(mesh, rank) for rank in (1, 2)] == [
        f"rank 1: data 0, stage{'s' * (len(stages[1]) > 1)} {', '.join(map(str, stages[1]))}",
        f"rank 2: data 1, stage{'s' * (len(stages[0]) > 1)} {', '.join(map(str, stages[0]))}",
    ]
    assert sum(mesh["layers"]) == 11 and len(mesh["layers"]) == sum(map(len, stages))
    assert 0 < mesh["predicted_bubble"] < 1 and 0 < mesh["measured_idle"] < 1
    assert (mesh["stage_s"] is None) == ("balance" in str(RUNS[name][0]))


@pytest.mark.parametrize("name", RUNS)
def test_actions_have_a_lane_per_stage_and_lie_inside_a_compute_span(trained, name):
    events = json.loads((trained(name) / "trace.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    pids = {(e["tid"], e["pid"]) for e in events}
    assert len(pids) == len({tid for tid, _ in pids})
    actions = [e for e in events if e.get("cat") == "stage"]
    assert actions and all(lanes[e["tid"]] == f"stage {e['args']['stage']}" for e in actions)
    assert all(e["name"].split()[1] == str(e["args"]["micro"]) for e in actions)
    of_rank = {pid: {e["args"]["stage"] for e in actions if e["pid"] == pid} for pid in range(4)}
    assert of_rank == {pid: {*RUNS[name][1][pid % 2]} for pid in range(4)}
    spans = [(e["pid"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "compute"]
    backward = [e for e in actions if e["name"][0] != "F"]  # an evaluation has forwards alone
    for event in backward[:: max(1, len(backward) // 50)]:
        start, end = event["ts"], event["ts"] + event["dur"]
        assert any(e[0] == event["pid"] and e[1] <= start and end <= e[2] for e in spans)


def test_waits_for_stages_count_as_wait_on_each_rank_and_not_as_compute(trained):
    folder = trained("1f1b")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    for rank in range(4):
        own = [e for e in events if e.get("ph") == "X" and e["pid"] == rank]
        stage_s = sum(e["dur"] for e in own if e["name"] == "wait for a stage") / 1e6
        wait_s = sum(e["dur"] for e in own if e["cat"] == "wait") / 1e6
        assert 0 < stage_s <= wait_s + 1e-6
        assert row["ranks"]["wait_s"][rank] == pytest.approx(wait_s, abs=2e-3)
        compute = [(e["ts"], e["ts"] + e["dur"]) for e in own if e["cat"] == "compute"]
        waits = [(e["ts"], e["dur"]) for e in own if e["cat"] == "wait"]
        inside = sum(dur for ts, dur in waits if any(a <= ts <= b for a, b in compute))
        compute_s = sum(b - a for a, b in compute) - inside
        assert row["ranks"]["compute_s"][rank] == pytest.approx(compute_s / 1e6, abs=2e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", RUNS)
def test_the_report_shows_the_schedule_predicted_and_measured(trained, name, tmp_path):
    record = read(trained(name))
    figure = pipeline.plot_schedule(record)
    titles = [axes.get_title() for axes in figure.axes]
    assert len(titles) == 2 and "predicted" in titles[0] and "measured" in titles[1]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    bars = [len(axes.patches) for axes in figure.axes]
    assert bars[0] == bars[1] > 0
    page.write(trained(name), tmp_path)
    assert (tmp_path / "schedule.png").exists()


def test_the_report_of_a_run_without_a_trace_shows_the_prediction(trained, tmp_path):
    folder = trained("even")
    for name in ("summary.json", "metrics.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    figure = pipeline.plot_schedule(read(tmp_path))
    assert [axes.get_title() for axes in figure.axes] == [
        f"digits, 1f1b: predicted by the clock from equal stages; idle {0.2:.0%}"
    ]


def test_a_trace_with_a_part_of_a_step_has_no_measured_schedule(trained, tmp_path):
    folder = trained("1f1b")
    lines = (folder / "trace.json").read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"name": "B 3"' not in line]
    assert len(kept) < len(lines)
    (tmp_path / "trace.json").write_text("".join(kept))
    (tmp_path / "summary.json").write_bytes((folder / "summary.json").read_bytes())
    assert len(pipeline.plot_schedule(read(tmp_path)).axes) == 1


#: settings of a dry run, and the planes of the optimizer
DRY = {
    "1f1b": (["pipeline.schedule=1f1b"], 1),
    "adamw": (["optimizer.kind=adamw", "optimizer.momentum="], 2),
    "sharded": (["engine.shard_optimizer=true"], 1),
    "zb-v": (["pipeline.schedule=zb-v"], 1),
    "local-sgd": (["engine.kind=local-sgd", "engine.period=2"], 1),
    "ps-sync": (["engine.kind=ps-sync", "engine.placement=colocated", "engine.servers=2"], 0),
    "gossip": (["engine.kind=gossip"], 0),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DRY)
def test_a_dry_run_shows_memory_by_kind_measured_and_predicted(name):
    changes, planes = DRY[name]
    spec = load(*changes)
    facts = run_on("threads", 4, lambda world: dry_run(spec, world, None))[0]
    assert facts["pipeline"].startswith(f"data 2 x pipe 2, {spec.pipeline.schedule} with 4")
    memory = facts["memory"]
    for measured, predicted in zip(memory["measured"], memory["predicted"], strict=True):
        assert measured == predicted
        assert min(measured["tapes"], measured["messages"], measured["gradients"]) > 0
    for pair in zip(memory["measured"][:2], memory["measured"][2:], strict=True):  # of one stage
        shares = 1 if name == "sharded" else 2
        if planes:  # else their optimizers' states are not counted
            assert sum(rank["optimizer"] for rank in pair) == shares * planes * pair[0]["gradients"]
    assert set(facts["memory_texts"]) == {f"{kind} of a rank" for kind in memory["measured"][0]}


def test_a_dry_run_without_a_pipeline_shows_none():
    spec = recipe.load("digits", ["model.widths=[64,8,10]"])
    facts = run_on("threads", 1, lambda world: dry_run(spec, world, None))[0]
    assert (facts["pipeline"], facts["memory"]) == ("", None)


#: schedule, ranks, micro-batches, samples that they share -> verdict
VERDICTS = {
    "take more": (("1f1b", 4, 8, 0), "bubble 27 %: take 16 micro-batches for 16 %, 32 for 9 %"),
    "ok": (("1f1b", 2, 16, 0), "bubble 6 %: ok"),
    "fewer than ranks": (
        ("1f1b", 4, 2, 0),
        "bubble 60 %, since micro-batches are fewer than ranks: take 4 micro-batches for 43 %, "
        "32 for 9 %",
    ),
    "divisors": (("1f1b", 4, 3, 12), "bubble 50 %, since micro-batches are fewer than ranks: take "
                 "6 micro-batches for 33 %, 12 for 20 %"),
    "no more samples": (("1f1b", 4, 8, 8), "bubble 27 %"),
}  # fmt: skip


@pytest.mark.parametrize("case", VERDICTS)
def test_verdicts(case):
    (name, ranks, count, batch), expected = VERDICTS[case]
    schedule = make(name, ranks, count)
    assert describe_bubble(schedule, uniform_costs(schedule, 1, 1, 1), batch) == expected


def test_a_verdict_on_unequal_stages_proposes_nothing_that_does_not_help():
    schedule = make("1f1b", 2, 64)
    costs = StageCosts((1.0, 9.0), (1.0, 9.0), (1.0, 9.0))
    text = describe_bubble(schedule, costs, 1 << 20)
    assert text == "bubble 45 %, 44 % by unequal work of the ranks"


def test_the_start_of_a_run_names_grid_schedule_stages_and_verdict(caplog, tmp_path):
    caplog.set_level("INFO")
    spec = load("pipeline.balance=[6,5]", "run.steps=1", "run.epochs=")
    run_on("threads", 2, lambda world: runs.train(spec, world, tmp_path / "run", resume=False))
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("pipeline")] == [
        "pipeline: data 1 x pipe 2, 1f1b with 4 micro-batches, stages of 6, 5 layers (times not "
        "measured, taken as equal): bubble 20 %: take 8 micro-batches for 11 %, 16 for 6 %"
    ]


def test_the_predicted_step_scales_with_the_samples():
    costs = pipeline_facts._scale_costs(StageCosts((1.0,), (2.0,), (3.0,)), 2.0)
    assert costs == StageCosts((2.0,), (4.0,), (6.0,))


def test_tapes_count_each_array_once_and_no_parameters():
    import numpy as np

    from hpctrain.parallel.pipeline.tape_bytes import peak_bytes, tape_bytes

    x, weight = np.zeros((4, 8)), np.zeros((8, 8))
    tape = [x, x[:2], (x.reshape(-1), None), {"w": weight.T}, "word"]
    assert tape_bytes(tape, {"weight": weight}) == x.nbytes
    actions = make("zb-h1", 2, 4).actions[0]
    assert Counter(action.op for action in actions) == {"F": 4, "I": 4, "W": 4}
    assert peak_bytes(actions, {0: 10.0}) == 20
    assert peak_bytes((Action("F", 0, 0), Action("B", 0, 0)), {0: 10.0}) == 10
