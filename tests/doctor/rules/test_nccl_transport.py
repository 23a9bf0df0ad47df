"""A slow transport is a finding where a better one is there or asked for, and where ranks wait for it."""

from __future__ import annotations

from typing import Any

import pytest

from closeranks.doctor.diagnose import diagnose
from closeranks.doctor.diagnosis_text import diagnosis_text
from closeranks.doctor.run_facts import RunFacts
from tests.doctor.made import even, facts
from tests.doctor.nccl_lines import IB, SHARED_MEMORY, TCP

SET = "w1:73:356 [0] NCCL INFO {} set by environment to {}\n"
NO_GPUDIRECT = IB.replace("/GDRDMA", "")


def _made(log: str, waited_s: float = 0.1, **more: Any) -> RunFacts:
    return facts(*even({"data.all_reduce": waited_s}), started={"device": "NVIDIA H200"}, nccl=log, **more)


@pytest.mark.parametrize(
    ("log", "waited_s", "said"),
    [
        (TCP.replace("SHM/direct/direct", "P2P/CUMEM"), 0.1, []),
        (TCP, 0.0, []),
        (SET.format("NCCL_IB_DISABLE", "1.") + TCP, 0.0, ["NCCL_IB_DISABLE turns it off"]),
        (SET.format("NCCL_IB_DISABLE", "0.") + TCP, 0.0, []),
        (SET.format("NCCL_NET", "Socket") + TCP, 0.0, ["NCCL_NET=Socket asks for TCP"]),
        (SET.format("NCCL_IB_HCA", "mlx5_0") + TCP, 0.0, ["NCCL_IB_HCA asks for InfiniBand: no device was found"]),
        (IB + TCP, 0.0, ["InfiniBand or RoCE devices were found"]),
        (TCP, 0.1, ["between GPUs of one host through its memory, not from GPU to GPU"]),
        (SHARED_MEMORY, 0.0, ["NCCL_P2P_DISABLE forbids peer access"]),
        (IB, 0.1, []),
        (NO_GPUDIRECT, 0.1, ["GPUDirect RDMA is not used"]),
        (NO_GPUDIRECT, 0.0, []),
        ("", 0.1, []),
    ],
)
def test_what_is_said_of_a_log(log: str, waited_s: float, said: list[str]) -> None:
    diagnosis = diagnose(_made(log, waited_s))
    found = [one for one in diagnosis.findings if one.cause == "nccl-transport"]
    assert diagnosis.failed_rules == ()
    assert len(found) == len(said)
    assert all(words in one.what for words, one in zip(said, found, strict=True))
    assert all(one.gain == pytest.approx(0.25 if waited_s else 0.0, abs=0.02) for one in found)


def test_a_slow_transport_explains_exposed_communication() -> None:
    log = SET.format("NCCL_IB_DISABLE", "1.") + TCP
    plain = diagnose(_made("", settings={"sync": {"overlap": False}})).findings
    assert [one.cause for one in plain] == ["exposed-communication"]
    found = diagnose(_made(log, settings={"sync": {"overlap": False}})).findings
    assert {one.cause for one in found} == {"nccl-transport"}
    assert found[0].advice == "Unset NCCL_IB_DISABLE, and compare."


def test_transports_are_shown_with_every_diagnosis_and_said_to_be_unknown_without_a_log() -> None:
    shown = diagnosis_text("run", _made(IB), diagnose(_made(IB)))
    assert "transport between hosts NET/IB with GPUDirect RDMA, 2 pairs | within a host P2P/CUMEM" in shown
    assert diagnose(_made(IB)).missing == ()
    assert "NCCL_DEBUG=INFO" in diagnose(_made("")).missing[0]
    assert diagnose(facts({}, {})).missing == ()
