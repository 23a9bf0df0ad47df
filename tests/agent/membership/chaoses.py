"""Chaos to put a cluster through: drawn by hypothesis, or from a seed."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from .trouble import Chaos, Fault

KINDS = ("crash", "hang", "cut", "deaf", "fault", "leave")


def faults(num_hosts: int) -> st.SearchStrategy[tuple[Fault, ...]]:
    one = st.builds(
        Fault,
        at=st.floats(1, 28),
        kind=st.sampled_from(KINDS),
        host=st.integers(0, num_hosts - 1),
        lasts=st.floats(0.1, 8),
    )
    return st.lists(one, max_size=10).map(tuple)


@st.composite
def chaoses(draw: st.DrawFn, *, most_contenders: int) -> Chaos:
    num_hosts = draw(st.integers(2, 5))
    return Chaos(
        seed=draw(st.integers(0, 1 << 30)),
        num_hosts=num_hosts,
        num_contenders=draw(st.integers(min(most_contenders, 2), min(most_contenders, num_hosts))),
        lead_works=draw(st.booleans()),
        most_members=draw(st.sampled_from((1, 2, 99))),
        loss=draw(st.sampled_from((0.0, 0.05, 0.3))),
        repeat=draw(st.sampled_from((0.0, 0.2))),
        late=draw(st.sampled_from((0.0, 0.05, 0.2))),
        faults=draw(faults(num_hosts)),
    )


def seeded(seed: int, num_contenders: int) -> Chaos:
    """Much of everything: to find a broken machine soon."""
    rng = random.Random(seed)
    num_hosts = rng.randint(max(2, num_contenders), 5)
    return Chaos(
        seed=seed,
        num_hosts=num_hosts,
        num_contenders=num_contenders,
        lead_works=rng.random() < 0.5,
        most_members=rng.choice((1, 99)),
        loss=rng.choice((0.05, 0.2)),
        repeat=0.2,
        late=rng.choice((0.05, 0.4)),
        faults=tuple(
            Fault(rng.uniform(1, 28), rng.choice(KINDS[:5]), rng.randrange(num_hosts), rng.uniform(0.1, 8))
            for _ in range(12)
        ),
    )


def unheard(seed: int, num_contenders: int) -> Chaos:
    """One member at a time and spares beside it, none on the lead's host. Answers come late, and then none comes: for
    about as long as a lease, or for much longer."""
    rng = random.Random(seed)
    faults, at = [], 4.0
    while at < 24:
        lasts = rng.choice((rng.uniform(2.8, 3.3), rng.uniform(5.5, 7.0)))
        faults += [Fault(at, "deaf", host, lasts) for host in rng.choice(((1,), (2,)))]
        at += lasts + 1
    return Chaos(seed, 3, num_contenders, lead_works=False, most_members=1, late=0.3, late_s=2.5, faults=tuple(faults))


def flapping(seed: int, num_contenders: int) -> Chaos:
    """Contenders that hang or lose sight of the register, for about as long as a lease or for longer."""
    rng = random.Random(seed)
    faults, at = [], 3.0
    while at < 24:
        lasts = rng.choice((rng.uniform(2.3, 3.2), rng.uniform(3.5, 6.0)))
        faults += [Fault(at, rng.choice(("cut", "hang")), host, lasts) for host in rng.choice(((0,), (1,)))]
        at += rng.uniform(1, 4)
    return Chaos(seed, 3, num_contenders, loss=0.1, late=0.1, faults=tuple(faults))
