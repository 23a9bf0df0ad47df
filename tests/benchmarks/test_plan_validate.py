"""The comparison of predictions with llm-analysis: its best share of the peak, and the rows that both can predict."""

from __future__ import annotations

import plan_validate
import pytest

from closeranks.plan.validation.run_plan import RunPlan
from tests.plan.validation.test_prediction_error import row


def test_the_peer_gets_its_best_share_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(plan: RunPlan, share: float) -> float | str:
        if plan.run.source == "c/c":
            return "it refuses"
        at_best = 0.4 if plan.cluster.device.name == "H100-SXM" else 0.6
        return plan.measured_s * at_best / share

    monkeypatch.setattr(plan_validate, "predict", predict)
    rows = [row("a/a", 1.0), row("b/b", 1.0, gpu="A100-80GB-SXM"), row("c/c", 1.0)]
    best, refused = plan_validate.peer_errors(rows)
    assert [one.signed for one in best] == pytest.approx([0, 0])
    assert refused == {"it refuses": 1}
