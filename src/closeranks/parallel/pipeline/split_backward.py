"""Splits a backward into two halves: input gradients now, for the previous stage; weight gradients later.

[Note: two halves] A stage's graph has a spine, the nodes on the path from its output to its input, and branches that
leave the spine towards parameters. The first half runs the spine alone and records the gradient at every node where a
branch leaves; the second half starts at these nodes and runs the branches alone. Together they compute what one
backward does, and once only, except for a weight that is used twice: the spine between its uses runs again, with the
recorded gradients substituted along it.

The second half ends in ``AccumulateGrad``, so hooks on parameters fire as usual; torch.distributed.pipelining's own
functions, on which this is modelled, bypass them, and stop where the branches of several weights meet. A node written
in Python (``torch.autograd.Function``) always computes all its gradients: the branches that leave there are run in the
first half, at no cost. A compiled node allows one pass only: with one in the graph, the first half does everything.
Without a spine no stage waits for a gradient, and the second half does everything.

Invariant: gradients are those of a whole backward, each added to ``.grad`` once, in the first half or the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]


@dataclass(slots=True, eq=False)
class WeightBranches:
    """Parameters that are reached from the same nodes of the spine, and the gradients recorded there."""

    roots: list[Node]
    leaves: list[Node]
    gradients: dict[Node, Gradients] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BackwardSplit:
    """What each half computes besides the spine."""

    later: tuple[WeightBranches, ...] = ()
    now: tuple[Node, ...] = ()
    """Parameters whose gradients the first half computes anyway."""
    whole: Literal["", "first", "second"] = ""
    """The half that does everything, if one does."""

    @property
    def has_gradients_now(self) -> bool:
        return self.whole == "first" or bool(self.now)


@dataclass(slots=True)
class WeightBackward:
    """What the second half has to do. It holds the graph, and with it the stage's activations."""

    branches: list[WeightBranches] = field(default_factory=list)
    whole: tuple[GradientEdge, Tensor | None] | None = None
    """A backward that was deferred as a whole."""

    @property
    def reruns_spine(self) -> bool:
        return any(len(branch.roots) > 1 for branch in self.branches)


def plan_split(output: GradientEdge, stage_input: Tensor | None) -> BackwardSplit:
    """Divide a graph into its two halves. Costs a walk over the graph on the host."""
    if stage_input is None:
        return BackwardSplit(whole="second")
    before = _reversed_edges(output.node)
    if any(_kind(node).startswith("CompiledFunction") for node in before):
        return BackwardSplit(whole="first")
    spine = _closure(get_gradient_edge(stage_input).node, before)
    if output.node not in spine:
        return BackwardSplit(whole="second")
    groups = _grouped({root: leaves for root in spine if (leaves := _leaves(root, spine))})
    later = tuple(group for group in groups if not any(map(_computes_all, group.roots)))
    return BackwardSplit(later, tuple(leaf for group in groups if group not in later for leaf in group.leaves))


def backward_input(
    output: GradientEdge, gradient: Tensor | None, stage_input: Tensor | None, plan: BackwardSplit
) -> WeightBackward:
    """The first half; the gradient of ``stage_input`` goes to its ``.grad``. A ``gradient`` of None is a loss's: 1."""
    if stage_input is None or plan.whole == "second":
        return WeightBackward(whole=(output, gradient))
    if plan.whole == "first":
        _backward({output: gradient})
        return WeightBackward()
    handles = [root.register_prehook(_noting(branch.gradients, root)) for branch in plan.later for root in branch.roots]
    try:
        wanted = [get_gradient_edge(stage_input), *(GradientEdge(leaf, 0) for leaf in plan.now)]
        _backward({output: gradient}, wanted, retain_graph=bool(plan.later))
    finally:
        for handle in handles:
            handle.remove()
    return WeightBackward(list(plan.later))


def backward_weight(remainder: WeightBackward) -> None:
    """The second half. Each group of branches frees its part of the graph when it is done."""
    if remainder.whole is not None:
        output, gradient = remainder.whole
        remainder.whole = None
        _backward({output: gradient})
    # Where the spine runs again, it passes nodes that later branches start from.
    retain_graph = remainder.reruns_spine
    while remainder.branches:
        _run(remainder.branches.pop(0), retain_graph)


def _run(branch: WeightBranches, retain_graph: bool) -> None:
    arrived: dict[GradientEdge, Tensor | None] = {
        GradientEdge(root, number): gradient
        for root, gradients in branch.gradients.items()
        for number, gradient in enumerate(gradients)
        if gradient is not None
    }
    # Tensor hooks run before these prehooks; they already took effect in the first half.
    handles = [root.register_prehook(_putting_back(gradients)) for root, gradients in branch.gradients.items()]
    try:
        if arrived:
            _backward(arrived, [GradientEdge(leaf, 0) for leaf in branch.leaves], retain_graph)
    finally:
        for handle in handles:
            handle.remove()


def _backward(
    gradients: Mapping[GradientEdge, Tensor | None],
    wanted: list[GradientEdge] | None = None,
    retain_graph: bool = False,
) -> None:
    edges, values = list(gradients), list(gradients.values())
    torch.autograd.backward(edges, values, retain_graph=retain_graph, inputs=wanted)


def _noting(noted: dict[Node, Gradients], root: Node) -> Callable[[Gradients], None]:
    def note(gradients: Gradients) -> None:
        noted[root] = gradients

    return note


def _putting_back(gradients: Gradients) -> Callable[[Gradients], Gradients]:
    return lambda _: gradients


def _reversed_edges(output: Node) -> dict[Node, list[Node]]:
    """Every node of a graph with its predecessors. Holding the nodes keeps their Python identities stable."""
    before: dict[Node, list[Node]] = {output: []}
    waiting = [output]
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in before:
                before[below] = []
                waiting.append(below)
            before[below].append(node)
    return before


def _closure(start: Node, before: Mapping[Node, list[Node]]) -> dict[Node, None]:
    """Nodes that lead to ``start``, itself included, in an order that depends on the graph alone."""
    found: dict[Node, None] = {start: None}
    waiting = [start]
    while waiting:
        for above in before.get(waiting.pop(), ()):
            if above not in found:
                found[above] = None
                waiting.append(above)
    return found


def _leaves(root: Node, spine: Mapping[Node, None]) -> dict[Node, None]:
    """Parameters on the branches that leave the spine at ``root``."""
    waiting = [below for below, _ in root.next_functions if below is not None and below not in spine]
    seen, leaves = dict.fromkeys(waiting), dict[Node, None]()
    while waiting:
        node = waiting.pop()
        if _kind(node).endswith("AccumulateGrad"):
            leaves[node] = None
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen[below] = None
                waiting.append(below)
    return leaves


def _grouped(leaves_of: Mapping[Node, Iterable[Node]]) -> list[WeightBranches]:
    """Group the roots that share a parameter, directly or through other roots."""
    group_of: dict[Node, WeightBranches] = {}
    for root, leaves in leaves_of.items():
        group = WeightBranches([root], list(leaves))
        met = {id(group_of[leaf]): group_of[leaf] for leaf in leaves if leaf in group_of}
        for other in met.values():
            group.roots += other.roots
            group.leaves += [leaf for leaf in other.leaves if leaf not in group.leaves]
        group_of.update(dict.fromkeys(group.leaves, group))
    return list({id(group): group for group in group_of.values()}.values())


def _kind(node: Node) -> str:
    """Reads the class's method: a user's Function that sets ``ctx.name`` hides the node's own method of that name."""
    return type(node).name(node)


def _computes_all(node: Node) -> bool:
    return isinstance(node, BackwardCFunction)
