"""Tables whose rows servers keep: a dense table's numbers, through faults and resizes, at the price of touched rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from closeranks import Session
from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.core.errors import CheckpointError, CloseranksError, ConfigError
from closeranks.core.events import Restored, StepPhases
from closeranks.core.system.environment import set_world
from closeranks.core.table_rows import ID_BITS
from closeranks.core.world import World
from closeranks.facts.shapes.model_structure import distinct_parameters
from closeranks.models.table import Table, Tables
from closeranks.optim.row_rules import ROW_RULES
from closeranks.parallel.initialization.materialize import materialize
from closeranks.run.job.describe import describe_job
from closeranks.run.job.job import load_job
from closeranks.sync.rows.row_messages import PULL_PHASE, PUSH_PHASE
from closeranks.testing import run_world
from tests.elastic.snapshot_files import shared_memory
from tests.run.generations import Case, assert_same, events, losses, run, run_and_die
from tests.run.saved import tensors
from tests.run.small import of_kind
from tests.run.test_recommender import TABLES as RECOMMENDER
from tests.run.test_recommender import Told, go

pytestmark = pytest.mark.world
slow = pytest.mark.slow

ROWS = 400
MANY = {"rows": ROWS}
"""More than a few steps touch."""
CONSTANT = {"schedule": {"name": "constant", "warmup": 0}, "weight_decay": 0.0}


def kept(rule: str = "adagrad", servers: int = 0, **server: Any) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {"optim": {**CONSTANT, "tables": {"rule": rule, "lr": 0.05}}}
    return {**tables, "sync": {"server": {"count": servers, **server}}}


# What they compute


def one_process(rule: str) -> tuple[list[float], dict[str, Tensor]]:
    """The job's own batches through a model with dense tables in a plain loop, its rows updated by the same rule."""
    set_world(World(launcher="testing"))
    torch.set_num_threads(1)
    dense = {**RECOMMENDER, "train": {**RECOMMENDER["train"], "precision": "float64"}, "checkpoint": {"save": False}}
    dense |= {name: {**RECOMMENDER[name], "rows": ROWS} for name in ("model", "data")}
    found = []
    with Session.from_job(load_job(None, extra=dense).value) as session:
        model, spec = session.model, session.engine.model.spec
        for step in session:
            micro_batches = []
            for batch in step:
                micro_batches.append(batch)
                step.backward(spec.loss(model, batch))
            found.append(micro_batches)
    torch.manual_seed(0)
    model = trained_from_scratch(session)
    others = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    adamw = torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    tables = {name: p for name, p in model.named_parameters() if name.startswith("tables.")}
    update = ROW_RULES[rule]()
    states = {name: update.init_state(table.detach()) for name, table in tables.items()}
    losses = []
    for micro_batches in found:
        parts = [spec.loss(model, batch) for batch in micro_batches]
        total, weight = sum(part.total for part in parts), sum(float(part.weight) for part in parts)
        assert isinstance(total, Tensor)
        total.backward()
        losses.append(total.item() / weight)
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item() / weight
        factor = min(1.0, 0.5 / (norm + 1e-6)) / weight
        for parameter in others:
            assert parameter.grad is not None
            parameter.grad *= factor
        adamw.step()
        for number, (name, table) in enumerate(tables.items()):
            ids = torch.cat([batch["ids"][:, number].reshape(-1) for batch in micro_batches])
            touched = torch.unique(ids[ids >= 0])
            assert table.grad is not None
            state = {key: tensor[touched] for key, tensor in states[name].items()}
            rows, after = update.update(table.detach()[touched], state, table.grad[touched] * factor, lr=0.05)
            with torch.no_grad():
                table[touched] = rows
            for key, tensor in after.items():
                states[name][key][touched] = tensor
        model.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained_from_scratch(session: Session) -> nn.Module:
    """The session's model as it was before its first step."""
    spec = session.engine.model.spec
    return materialize(
        spec, seed=session.job.run.seed, device=torch.device("cpu"), dtype=torch.float64, broadcast=lambda one: one
    )


def saved_rows(place: Path, num_tables: int = 4, rows: int = ROWS, dim: int = 4) -> dict[str, Tensor]:
    """The rows of a run's newest checkpoint as dense tables, with NaN where a row was never touched."""
    found = {f"tables.{number}.weight": torch.full((rows, dim), torch.nan).double() for number in range(num_tables)}
    parts = tensors(place, "tables")
    for key in parts:
        block, _, column = key.rpartition("/")
        if column == "keys":
            for key_of_row, row in zip(parts[key].tolist(), parts[f"{block}/rows"], strict=True):
                table = found[f"tables.{key_of_row >> ID_BITS}.weight"]
                assert table[key_of_row % (1 << ID_BITS)].isnan().all(), "no row is kept twice"
                table[key_of_row % (1 << ID_BITS)] = row.double()
    return found


@pytest.mark.parametrize(
    ("size", "rule", "layout", "server"),
    [
        (4, "adagrad", {}, {"servers": 2}),
        pytest.param(3, "adam", {}, {"servers": 1}, marks=slow),
        pytest.param(3, "adagrad", {}, {"servers": 1, "mode": "stale", "bound": 0, "every": 2}, marks=slow),
        pytest.param(2, "adagrad", {}, {}, marks=slow),
        pytest.param(3, "adam", {"zero": 1}, {}, marks=slow),
        pytest.param(2, "adam", {"zero": 3}, {}, marks=slow),
    ],
)
def test_a_run_equals_a_plain_loop_over_dense_tables(
    tmp_path: Path, size: int, rule: str, layout: dict[str, int], server: dict[str, Any]
) -> None:
    expected_losses, expected = one_process(rule)
    tables = kept(rule, **server)
    tables["optim"] = {**tables["optim"], "lr": 1e-2, "clip": 0.5}
    changes = {**tables, "train": {"precision": "float64"}, "layout": layout, "model": MANY, "data": MANY}
    found: list[Told] = run_world(go, size, tmp_path, changes)
    assert found[0][0] == pytest.approx(expected_losses, rel=1e-9)
    assert all(told == found[0][1] for _, told in found), "every rank tells the same evaluation"
    rows = saved_rows(tmp_path)
    for name, table in rows.items():
        is_touched = ~table.isnan().any(1)
        assert 0 < is_touched.sum() < len(table), "some rows were never touched, and are not saved"
        assert relative(table[is_touched], expected[name][is_touched]) < 1e-9, name
    for name, weight in tensors(tmp_path, "model").items():
        assert relative(weight, expected[name]) < 1e-9, name


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-30))


@slow
def test_workers_that_do_not_wait_learn(tmp_path: Path) -> None:
    tables = kept(servers=1, mode="stale", bound=1, every=8)
    changes = {**tables, "train": {"steps": 48, "global_batch": 200, "micro_batch": 50}}
    found: list[Told] = run_world(go, 3, tmp_path, changes)
    assert sum(found[0][0][-8:]) < 0.95 * sum(found[0][0][:8])


# What travels


def drawn_ids(steps: int) -> list[list[list[int]]]:
    """The distinct rows of each micro-batch by step, for one worker: micro-batches of its whole share."""
    set_world(World(launcher="testing"))
    dense = {**RECOMMENDER, "train": {**RECOMMENDER["train"], "steps": steps}, "checkpoint": {"save": False}}
    found = []
    with Session.from_job(load_job(None, extra=dense).value) as session:
        for step in session:
            of_step = []
            for batch in step:
                of_step.append([len(torch.unique(ids[ids >= 0])) for ids in batch["ids"].unbind(1)])
                step.backward(session.loss(batch))
            found.append(of_step)
    return found


def test_bytes_are_those_of_touched_rows_whatever_the_table_holds(tmp_path: Path) -> None:
    """One worker and one server; a table of a trillion rows, of which the samples name forty. An evaluation follows the
    last step, which is left out."""
    changes = {**kept(servers=1), "model": {"rows": 10**12}, "train": {"steps": 4}}
    run_world(go, 2, tmp_path, changes)
    keys, row, header = 8, 4 * RECOMMENDER["model"]["dim"], 8 * 3
    for step, of_step in enumerate(drawn_ids(3), start=1):
        rows = sum(sum(of_tables) for of_tables in of_step)
        (worker,), (server,) = (sent_bytes(tmp_path, rank, step) for rank in (0, 1))
        assert worker[PULL_PHASE] == len(of_step) * header + rows * keys
        assert worker[PUSH_PHASE] == len(of_step) * header + rows * (keys + row)
        assert server[PULL_PHASE] == rows * row


def sent_bytes(folder: Path, rank: int, step: int) -> list[dict[str, int]]:
    return [one.sent_bytes for one in of_kind(folder, StepPhases, rank) if one.step == step]


# Faults and resizes


@pytest.fixture
def place() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


def case(place: Path, layout: str, tables: dict[str, dict[str, Any]], **more: Any) -> Case:
    own = {name: RECOMMENDER[name] for name in ("model", "data")}
    train = {"global_batch": 36, "micro_batch": 5, "eval_samples": 50, **tables.get("train", {})}
    return Case(place, layout, tables={**own, **tables, "train": train}, **more)


@pytest.mark.parametrize(
    ("layout", "servers", "victim"),
    [
        ("data=3", 1, 2),
        pytest.param("data=3", 1, 0, marks=slow),
        pytest.param("data=4", 2, 3, marks=slow),
        pytest.param("data=2", 0, 1, marks=slow),
        pytest.param("data=2 zero=1", 0, 0, marks=slow),
    ],
)
def test_a_killed_rank_changes_no_bit(place: Path, layout: str, servers: int, victim: int) -> None:
    struck = case(place / "run", layout, kept("adam", servers), deaths=((victim, "step:4"),))
    run_and_die(struck)
    run(replace(struck, generation=1, deaths=()))
    (restored,) = events(struck, Restored)
    assert restored.source == "memory"
    calm = replace(struck, folder=place / "calm", deaths=())
    run(calm)
    assert_same(struck, calm)
    mine = tensors(struck.folder / "run", "tables")
    assert mine
    for key, tensor in tensors(calm.folder / "run", "tables").items():
        assert torch.equal(mine[key], tensor), key


ORDERS = [
    (("data=3", 1), ("data=4", 2)),
    pytest.param(("data=4", 2), ("data=3", 1), marks=slow),
    pytest.param(("data=3", 1), ("data=2", 0), marks=slow),
    pytest.param(("data=2", 0), ("data=4", 2), marks=slow),
]


@pytest.mark.parametrize(("first", "then"), ORDERS)
def test_a_run_goes_on_with_another_number_of_servers(
    place: Path, first: tuple[str, int], then: tuple[str, int]
) -> None:
    exact = {"train": {"precision": "float64"}}
    one = case(place / "run", first[0], {**kept(servers=first[1]), **exact}, drain_at=3)
    run(one)
    resumed = case(place / "run", then[0], {**kept(servers=then[1]), **exact, "checkpoint": {"resume": "auto"}})
    run(resumed)
    whole = case(place / "whole", "data=2", {**kept(servers=0), **exact})
    run(whole)
    assert list(losses(resumed)) == list(losses(whole))
    for step, (loss, _) in losses(resumed).items():
        assert loss == pytest.approx(losses(whole)[step][0], rel=1e-9)
    mine, theirs = saved_rows(one.folder / "run"), saved_rows(whole.folder / "run")
    for name, table in theirs.items():
        assert torch.equal(mine[name].isnan(), table.isnan())
        assert relative(mine[name].nan_to_num(), table.nan_to_num()) < 1e-9


@slow
def test_a_worker_leaves(place: Path) -> None:
    """From memory: the servers' rows are found in the copies of another layout."""
    one = case(place / "run", "data=4", {**kept(servers=1), "train": {"precision": "float64"}}, regroup_at=3)
    run(one)
    run(replace(one, layout="data=3", generation=1, regroup_at=0))
    (restored,) = events(one, Restored)
    assert (restored.step, restored.source) == (3, "memory")
    whole = case(place / "whole", "data=2", {**kept(servers=0), "train": {"precision": "float64"}})
    run(whole)
    for step, (loss, _) in losses(one).items():
        assert loss == pytest.approx(losses(whole)[step][0], rel=1e-9)


# Modules of one's own, and checkpoints of touched rows


class Own(nn.Module):
    """Tables of two widths, one of which is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.many = Tables([Table("user", 200_000, 2, "sum"), Table("item", 50, 3)])
        self.out = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        users, items = self.many([ids, ids[:, 0] % 50])
        return self.out(torch.cat([users, items, self.many[1](ids[:, 1] % 50)], dim=1)).squeeze(1)


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = (model(batch["ids"]) - batch["y"]).square().mean()
    return loss


class Ids(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The first step names 40,000 users, the later ones sixteen of them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng(index)
        ids = np.arange(index, 40_000, 8) if index < 8 else rng.integers(0, 16, 5000)
        return {"ids": torch.from_numpy(ids), "y": torch.tensor(float(index % 3))}


def train_own(folder: Path, servers: int, checkpoint: dict[str, Any]) -> float:
    given: dict[str, Any] = {
        "run": {"folder": str(folder)},
        "train": {"steps": 5, "global_batch": 8, "micro_batch": 2, "precision": "float64"},
        "optim": {"lr": 0.02, "tables": {"rule": "adam"}},
        "sync": {"server": {"count": servers}},
        "loading": {"shuffle": "none"},
        "checkpoint": checkpoint,
    }
    with Session(Own, Ids(), own_loss, **given) as session:
        for step in session:
            step.run()
        return session.result.loss


@slow
def test_a_module_of_ones_own_and_incremental_checkpoints(tmp_path: Path) -> None:
    ran = run_world(train_own, 4, tmp_path / "served", 2, {"every": 2})
    alone = run_world(train_own, 1, tmp_path / "alone", 0, {})
    assert ran[0] == pytest.approx(alone[0], rel=1e-9)
    reader = open_newest(str(tmp_path / "served"))
    written = {"own": 0, "referred": 0}
    for entry in reader.manifest.entries:
        if entry.chunk.section == "tables":
            written["referred" if "/" in entry.file else "own"] += entry.chunk.num_bytes
    assert written["own"] + written["referred"] > 40_000 * 2 * 8
    assert written["own"] < 0.6 * written["referred"], "blocks of rows that were not touched are not written again"


# What is refused


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"layout": {"tensor": 2}}, "optim.tables.rule"),
        ({"sync": {"local": {"every": 4}}}, "optim.tables.rule"),
        ({"sync": {"server": {"count": 1, "mode": "async"}}}, "optim.tables.rule"),
        ({"sync": {"server": {"count": 1, "backup": 1}}}, "optim.tables.rule"),
        ({"optim": {"ema": 0.9}}, "optim.ema"),
        ({"train": {"compile": True}}, "optim.tables.rule"),
        ({"checkpoint": {"weights": "somewhere"}}, "checkpoint.weights"),
    ],
)
def test_a_job_whose_rows_cannot_be_kept(tables: dict[str, dict[str, Any]], key: str) -> None:
    rule = {"tables": {"rule": "adagrad"}}
    given = {name: {**RECOMMENDER.get(name, {}), **tables.get(name, {})} for name in {**RECOMMENDER, **tables}}
    given["optim"] = {**given["optim"], **rule}
    with pytest.raises(ConfigError) as found:
        load_job(None, extra=given)
    assert key in [problem.place for problem in found.value.problems]


def opened(model: Any, rule: str = "adagrad") -> str:
    """What the session says that cannot be opened."""
    tables = {"train": {"steps": 1, "global_batch": 8}, "optim": {"tables": {"rule": rule}}}
    try:
        Session(model, Ids(), own_loss, checkpoint={"save": False}, **tables).close()
    except CloseranksError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("alone")
def test_models_whose_rows_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    twins = lambda: nn.ModuleList([Table("a", 5, 2), Table("a", 5, 2), nn.Linear(1, 1)])  # noqa: E731
    assert "table 'user' was made before the run" in opened(Own())
    assert "two tables of the model are named 'a'" in opened(twins)
    assert "the model has no table" in opened(lambda: nn.Linear(1, 1))
    assert opened(Own) == ""


@pytest.mark.usefixtures("alone")
def test_a_state_of_other_tables_is_refused(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {"train": {"steps": 2}}
    go(tmp_path / "rows", {**kept(), **changes})
    go(tmp_path / "dense", {**changes, "optim": CONSTANT})
    longer: dict[str, dict[str, Any]] = {"train": {"steps": 3}}
    for place, tables, said in (
        ("rows", {"optim": CONSTANT}, "keeps tables as rows"),
        ("dense", kept(), "has tables as parameters"),
        ("rows", kept("adam"), "the state of 'adagrad'"),
    ):
        with pytest.raises(CheckpointError, match=said):
            go(tmp_path / "next", {**tables, **longer, "checkpoint": {"resume": str(tmp_path / place)}})
    assert go(tmp_path / "next", {**kept(), **longer, "checkpoint": {"resume": str(tmp_path / "rows")}})


@pytest.mark.parametrize("rule", ["adagrad", "none"])
def test_planning_counts_no_rows(rule: str) -> None:
    recommender = {**RECOMMENDER["model"], "rows": 10**11}
    for model, data in ((recommender, "clicks"), ({"name": f"{__name__}:Own"}, "digits")):
        tables = {**RECOMMENDER, "model": model, "data": {"name": data}, "optim": {"tables": {"rule": rule}}}
        structure = describe_job(load_job(None, extra=tables).value).structure
        names = [one.name for one in distinct_parameters(structure.units)]
        assert any(name.startswith(("tables.", "many.")) for name in names) is (rule == "none")
