"""Does NCCL send on a slower way than the hardware offers: TCP beside InfiniBand, or through the memory of the host?

Known only from NCCL's own log (``doctor.nccl_log``). A slow way that nothing better can replace, as TCP between hosts
without InfiniBand, is no finding: the transports are shown with every diagnosis.
"""

from __future__ import annotations

from collections.abc import Iterator

from closeranks.doctor.finding import LEAST_GAIN, Finding, percent
from closeranks.doctor.nccl_log import SOCKET, NcclLog, NcclTransport
from closeranks.doctor.run_facts import RunFacts

_CAUSE = "nccl-transport"
_OFF = frozenset({"", "0", "false", "off"})
_LESS = 0.5
"""The share of the waiting that a better way is expected to save: a cautious guess."""


def find(facts: RunFacts) -> Iterator[Finding]:
    log = facts.nccl
    if log is None:
        return
    gain = _LESS * facts.share(sum(facts.exposed_s.values()))
    for one in log.transports:
        looked_at = _between_hosts(log, one, gain) if one.is_between_hosts else _within_host(log, one, gain)
        if looked_at:
            what, advice = looked_at
            yield Finding(
                _CAUSE,
                what,
                (
                    f"NCCL's log: {one.example} ({one.num_channels} such channels)",
                    f"ranks wait {percent(gain / _LESS)} of the time for collectives",
                ),
                advice,
                gain=gain,
                explains=frozenset({"exposed-communication"}),
            )


def _between_hosts(log: NcclLog, one: NcclTransport, gain: float) -> tuple[str, str] | None:
    """What is wrong, and what to do; None if nothing is."""
    if one.via == SOCKET and (why := _why_ib_is_expected(log)):
        return f"NCCL sends between hosts over TCP, although {why}.", _ib_advice(log)
    if one.via.startswith("NET/IB") and not one.has_gpudirect and gain >= LEAST_GAIN:
        return (
            "NCCL copies what it sends to other hosts through the memory of the host: GPUDirect RDMA is not used.",
            "Load nvidia-peermem or use DMA-BUF, and look at NCCL_NET_GDR_LEVEL: docs/nccl.md lists what it needs.",
        )
    return None


def _why_ib_is_expected(log: NcclLog) -> str:
    if _is_on(log, "NCCL_IB_DISABLE"):
        return "InfiniBand may be there: NCCL_IB_DISABLE turns it off"
    if log.settings.get("NCCL_NET", "").lower() == "socket":
        return "InfiniBand may be there: NCCL_NET=Socket asks for TCP"
    if log.has_ib or any(one.via.startswith("NET/IB") for one in log.transports):
        return "InfiniBand or RoCE devices were found"
    asked = [name for name in ("NCCL_IB_HCA", "NCCL_NET", "NCCL_IB_GID_INDEX") if name in log.settings]
    return f"{asked[0]} asks for InfiniBand: no device was found" if asked else ""


def _ib_advice(log: NcclLog) -> str:
    for name in ("NCCL_IB_DISABLE", "NCCL_NET"):
        if _is_on(log, name):
            return f"Unset {name}, and compare."
    return (
        "Look for `NET/IB` in the log of each host: the driver (libibverbs) and /dev/infiniband must be visible in the "
        "container, and NCCL_IB_HCA must name the devices of every host."
    )


def _within_host(log: NcclLog, one: NcclTransport, gain: float) -> tuple[str, str] | None:
    if one.via.startswith("P2P") and one.via != "P2P/indirect":
        return None
    barred = [name for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL") if _is_on(log, name)]
    if not barred and gain < LEAST_GAIN:  # many GPUs have no peer access, and nothing waits for it
        return None
    way = "over the network" if one.via.startswith(("NET", "COLLNET")) else "through its memory"
    if barred:
        return (
            f"NCCL sends between GPUs of one host {way}: {barred[0]} forbids peer access.",
            f"Unset {barred[0]}, unless peer access is broken here, and compare.",
        )
    return (
        f"NCCL sends between GPUs of one host {way}, not from GPU to GPU.",
        "nvidia-smi topo -p2p r says whether peer access is possible: a virtual machine, ACS or the IOMMU may prevent "
        "it, or containers that see one GPU each. NCCL_P2P_LEVEL allows it over larger distances.",
    )


def _is_on(log: NcclLog, name: str) -> bool:
    return log.settings.get(name, "").lower() not in _OFF
