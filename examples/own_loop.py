"""Your own loop with a Session in it. Run it with `closeranks run -n 2 examples/own_loop.py`, or plain python."""

import torch
from torch import nn

from closeranks import Session

x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))

session = Session(model, dataset, train={"steps": 100, "global_batch": 32}, optim={"lr": 3e-3})
for step in session:
    for batch in step:
        step.backward(nn.functional.cross_entropy(session.model(batch["x"]), batch["y"]))
if session.world.is_lead:
    print(f"loss {session.result.loss:.4f}")
