"""Hooks: evaluate, stop early, log what you like. Run it with `closeranks run -n 2 examples/hooks.py`."""

import torch
from torch import nn

import closeranks
from closeranks import EarlyStop, Hook, Loss, Session
from closeranks.core.events import Evaluated, StepDone


class Print(Hook):
    """A custom logger: every hook runs on every rank, so rank 0 speaks."""

    def on_step(self, session: Session, step: StepDone) -> None:
        if session.world.is_lead and step.step % 50 == 0:
            print(f"after {step.step} steps the accuracy on the batch is {step.metrics['accuracy']:.2f}")

    def on_eval(self, session: Session, result: Evaluated) -> None:
        if session.world.is_lead:
            print(f"held-out accuracy {result.metrics['accuracy']:.3f}")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
    """A sum, its weight, and a custom metric: the ranks add all three up, so accuracy is exact on any of them."""
    answers = model(batch["x"])
    total = nn.functional.cross_entropy(answers, batch["y"], reduction="sum")
    correct = (answers.argmax(1) == batch["y"]).sum()
    return Loss(total, float(len(batch["y"])), {"accuracy": correct})


x = torch.randn(1200, 8, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()
data = torch.utils.data.TensorDataset(x[:1000], y[:1000])
held_out = torch.utils.data.TensorDataset(x[1000:], y[1000:])
result = closeranks.train(
    model,
    data,
    loss,
    eval_data=held_out,
    hooks=[Print(), EarlyStop("accuracy", patience=2, maximise=True)],
    metrics=["accuracy"],
    train={"steps": 400, "global_batch": 32, "eval_every": 50},
    optim={"lr": 3e-3},
)
