"""The laws of the membership, over random chaos; and proof that each of them can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, example, given, settings

from .chaoses import chaoses
from .cluster import Cluster, Parts, Violation
from .mutants import IN_CLUSTERS, IN_SCENES
from .scenes import SCENES
from .trouble import Chaos, Fault

_LONG = settings(max_examples=15, suppress_health_check=list(HealthCheck))
_MOST_SEEDS = 400


@_LONG
@given(chaoses(most_contenders=1))
@example(Chaos(1, faults=(Fault(5.0, "cut", 0, 20.0),)))
@example(Chaos(2, num_hosts=2, lead_works=False, faults=(Fault(5.0, "hang", 1, 8.0), Fault(6.0, "crash", 1, 1.0))))
def test_one_lead(chaos: Chaos) -> None:
    Cluster(chaos).run()


@_LONG
@given(chaoses(most_contenders=3))
@example(Chaos(3, num_contenders=3, faults=(Fault(5.0, "crash", 0, 5.0), Fault(5.1, "crash", 1, 5.0))))
def test_several_contenders(chaos: Chaos) -> None:
    Cluster(chaos).run()


def test_a_quiet_cluster_forms_once_and_commits() -> None:
    cluster = Cluster(Chaos(4, num_hosts=4)).run()
    names = [members for _, _, members in cluster.begun]
    assert len(names) <= 4
    assert len(names[-1]) == 4
    assert len(cluster.commits) > 400


def test_the_far_side_of_a_split_commits_nothing() -> None:
    """Three hosts are cut off together with their workers' network; the lead's side goes on, and takes them back."""
    cuts = tuple(Fault(8.0, "cut", host, 12.0) for host in (2, 3, 4))
    cluster = Cluster(Chaos(5, num_hosts=5, faults=cuts)).run()
    meanwhile = [members for at, _, members in cluster.begun if 8 < at < 20]
    assert meanwhile == [("h0", "h1")] or meanwhile == [("h1", "h0")]
    assert len(cluster.begun[-1][2]) == 5


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_scenes(scene: Callable[[Parts], None]) -> None:
    scene(Parts())


@pytest.mark.parametrize("name", IN_SCENES)
def test_a_broken_machine_fails_a_scene(name: str) -> None:
    failed = [scene for scene in SCENES if not _holds(scene, IN_SCENES[name])]
    assert len(failed) in (1, 2)


def _holds(scene: Callable[[Parts], None], parts: Parts) -> bool:
    try:
        scene(parts)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", IN_CLUSTERS)
def test_a_broken_machine_breaks_a_law(name: str) -> None:
    """In a chaos that the right machines come through."""
    hunt = IN_CLUSTERS[name]
    for seed in range(_MOST_SEEDS):
        chaos = hunt.chaos(seed, hunt.num_contenders)
        try:
            Cluster(chaos, hunt.parts).run()
        except Violation:
            Cluster(chaos).run()
            return
    pytest.fail(f"no chaos of {_MOST_SEEDS} found out a machine that {name}")
