"""Communication follows its formulas: rings, hierarchies, rails, what overlap hides and costs, what ZeRO gathers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from closeranks.facts.cluster import parse_cluster
from closeranks.facts.communication.group_time import (
    all_reduce_seconds,
    all_to_all_seconds,
    axis_group,
    gather_seconds,
    group_links,
    send_seconds,
)
from closeranks.facts.layout import Layout
from closeranks.facts.shapes.llama import PRESETS
from closeranks.facts.shapes.transformer import block_params, from_llama
from closeranks.plan.step_time.comm_time import (
    LayoutGroups,
    context_seconds,
    data_traffic,
    expert_seconds,
    exposed_seconds,
)
from closeranks.plan.step_time.constants import OverlapModel, frozen_constants
from closeranks.plan.step_time.estimate import estimate_step
from closeranks.plan.step_time.workload import PlanChoice, Workload

SHAPE = from_llama(PRESETS["8b"])
HOST, HOSTS = parse_cluster("8xh100"), parse_cluster("64xh100")
NUM_BYTES = 1e9
WORK = Workload(SHAPE, 4096, 512)


def data_s(choice: PlanChoice, global_batch: int = 512) -> float:
    return estimate_step(Workload(SHAPE, 4096, global_batch), choice, HOSTS).part("data communication")


def test_a_ring_passes_each_part_on_to_all_other_ranks() -> None:
    """2 (n - 1) / n of the bytes for a sum, half of that for a gather, and a latency for each hop."""
    for num_ranks in (2, 4, 8):
        links = group_links(axis_group(num_ranks, 1, HOST), HOST)
        moved_s = (num_ranks - 1) / num_ranks * NUM_BYTES / HOST.intra_host.effective_bytes_per_s
        once_s = moved_s + (num_ranks - 1) * HOST.intra_host.latency_s
        assert gather_seconds(NUM_BYTES, links) == pytest.approx(once_s)
        assert all_reduce_seconds(NUM_BYTES, links) == pytest.approx(2 * once_s)


def test_a_hierarchy_passes_fewer_hops_than_a_ring_over_many_hosts() -> None:
    big = parse_cluster("4096xh100")
    links = group_links(axis_group(4096, 1, big), big)
    assert big.inter_host is not None
    between_s = 511 / 512 * 1e6 / 8 / big.inter_host_bytes_per_s + 511 * big.inter_host.latency_s
    inside_s = 7 / 8 * 1e6 / big.intra_host.effective_bytes_per_s + 7 * big.intra_host.latency_s
    assert gather_seconds(1e6, links) == pytest.approx(between_s + inside_s)
    assert links.ring_latency_s > between_s + inside_s


def test_half_the_rails_take_twice_as_long_between_hosts() -> None:
    def all_reduce_s(rails: int, stride: int) -> float:
        cluster = replace(HOSTS, rails=rails)
        return all_reduce_seconds(1e10, group_links(axis_group(8, stride, cluster), cluster))

    assert all_reduce_s(4, 8) == pytest.approx(2 * all_reduce_s(8, 8), rel=0.01)
    assert all_reduce_s(8, 8) == all_reduce_s(0, 8), "one for each device by default"
    assert all_reduce_s(4, 1) == all_reduce_s(8, 1), "inside a host there are none"


def test_what_is_hidden_slows_what_hides_it() -> None:
    overlap = OverlapModel(hidden=0.9, slowdown=0.2)
    assert exposed_seconds(1.0, 10.0, overlap) == pytest.approx(0.2), "all hidden, at a fifth of its time"
    assert exposed_seconds(1.0, 0.5, overlap) == pytest.approx(1 - 0.45 + 0.2 * 0.45)
    assert exposed_seconds(1.0, 0.0, overlap) == 1.0
    assert exposed_seconds(0.0, 1.0, overlap) == 0.0


def test_overlap_hides_gradients_and_costs_its_slowdown() -> None:
    choice = PlanChoice(Layout(64, zero=1))
    beside, alone = data_s(choice), data_s(replace(choice, overlap=False))
    least = frozen_constants().overlap.slowdown
    assert least * alone < beside < alone


def test_zero_3_gathers_twice_and_sums_once_for_each_micro_batch() -> None:
    """ZeRO-1 sums gradients and gathers weights once a step; in a pipeline ZeRO-3 gathers a stage once a step."""
    choice, software = PlanChoice(Layout(64, zero=3), overlap=False), frozen_constants().of("closeranks")
    groups = LayoutGroups(choice.layout, HOSTS)
    block = block_params(SHAPE)
    traffic = data_traffic(0.0, block, choice, groups, software)
    assert traffic.gather_s == pytest.approx(gather_seconds(block * software.gathered_bytes, groups.shard))
    assert traffic.scatter_s == pytest.approx(gather_seconds(block * software.gradient_bytes, groups.shard))

    one, two, four = (data_s(choice, 64 * num_micro) for num_micro in (1, 2, 4))
    assert two - one == pytest.approx(SHAPE.num_layers * (2 * traffic.gather_s + traffic.scatter_s))
    assert four - two == pytest.approx(2 * (two - one))
    for layout in (Layout(64, zero=1), Layout(16, zero=3, pipeline=4)):
        assert data_s(replace(choice, layout=layout), 64) == data_s(replace(choice, layout=layout), 256)


def test_replicas_of_shards_sum_their_slices() -> None:
    choice, software = PlanChoice(Layout(64, zero=3, shard=8)), frozen_constants().of("closeranks")
    groups = LayoutGroups(choice.layout, HOSTS)
    traffic = data_traffic(1e9, 1e8, choice, groups, software)
    slices = 1e9 * software.gradient_bytes / 8
    assert groups.replica.group.num_hosts == 8
    assert traffic.gradients_s == pytest.approx(all_reduce_seconds(slices, groups.replica))


def test_the_tensor_axis_has_eight_transfers_in_each_block_and_micro_batch() -> None:
    """Attention and feed-forward each gather their input and scatter their sum, forward and backward, and the ends of
    the model have four transfers each. Without sequence parallelism an all-reduce takes the place of two transfers."""
    choice, num_micro = PlanChoice(Layout(8, tensor=8), micro_batch=2), 512 / 8 / 2
    links, num_bytes = LayoutGroups(choice.layout, HOSTS).tensor, 2 * 4096 * SHAPE.dim * 2.0
    num_transfers = num_micro * (8 * SHAPE.num_layers + 2 * 4)
    found = estimate_step(WORK, choice, HOSTS).part("tensor communication")
    assert found == pytest.approx(num_transfers * gather_seconds(num_bytes, links))
    whole = estimate_step(WORK, replace(choice, sequence_parallel=False), HOSTS).part("tensor communication")
    assert whole == pytest.approx(num_transfers / 2 * all_reduce_seconds(num_bytes, links))


def test_each_micro_batch_is_received_and_sent_in_both_directions() -> None:
    choice = PlanChoice(Layout(16, pipeline=4), micro_batch=2)
    each_s = send_seconds(2 * 4096 * SHAPE.dim * 2.0, 16, HOSTS)
    num_micro = 512 / 16 / 2
    found = estimate_step(WORK, choice, HOSTS).part("pipeline sends")
    assert found == pytest.approx(2 * each_s * (num_micro + 3))


def test_keys_and_values_pass_around_the_ring_of_the_context_axis() -> None:
    """To all but the last of the other ranks; in backward with their gradients."""
    choice = PlanChoice(Layout(16, context=4))
    ring = context_seconds(SHAPE, 1024, choice, LayoutGroups(choice.layout, HOSTS))
    once_s = send_seconds(2 * 1024 * SHAPE.kv_dim * 2.0, 1, HOSTS)
    assert ring.forward == pytest.approx(3 * once_s)
    assert ring.backward == pytest.approx(6 * once_s)


def test_tokens_go_to_their_experts_and_back() -> None:
    shape = replace(SHAPE, num_experts=16, experts_per_token=2)
    choice = PlanChoice(Layout(8, expert=8))
    groups = LayoutGroups(choice.layout, HOST)
    found = expert_seconds(shape, 4096, choice, groups)
    sent = 4096 * 2 * shape.dim * 2.0
    assert found.forward == found.backward == pytest.approx(2 * all_to_all_seconds(sent, groups.expert, 2))
    assert all_to_all_seconds(sent, groups.expert, 2) > 7 / 8 * sent / HOST.intra_host.effective_bytes_per_s
