"""The rooms without a Session: what a run is made of, in one loop. Run it with `python examples/bare_loop.py`.

Order, model, optimizer and vote are the same parts a Session wires together; use them alone where you need only one.
"""

import torch

from closeranks.core.seeds import derive_seed
from closeranks.data.config import TextConfig
from closeranks.data.loading.loader import Loader
from closeranks.data.sampling.order import BatchSchedule, FullOrder
from closeranks.data.sources.open import open_source
from closeranks.elastic.vote import Ballot, Vote
from closeranks.models.build import spec_for
from closeranks.models.config import LlamaConfig
from closeranks.optim.config import OptimConfig
from closeranks.optim.norms import norm_squared
from closeranks.optim.optimizer import Optimizer, freeze
from closeranks.parallel.initialization.materialize import materialize
from closeranks.parallel.process_group import RankGroup
from closeranks.sync.reducers.all_reduce import AllReduceReducer
from closeranks.sync.reducers.local_parameters import local_parameters

SEED, STEPS = 0, 30
device, group = torch.device("cpu"), RankGroup(rank=0, size=1)

source = open_source(TextConfig(seq_len=64), "train", SEED)
schedule = BatchSchedule.for_steps(len(source), global_batch=16, micro_batch=8, steps=STEPS)
loader = Loader(source, FullOrder(len(source), SEED), schedule, device=device)

spec = spec_for(LlamaConfig(preset="tiny", num_layers=2), seq_len=64)
module = materialize(spec, seed=SEED, device=device, dtype=torch.float32, broadcast=group.broadcast)
config = OptimConfig(lr=3e-3)
treatment = freeze(module, config)  # which parameters decay, and which are not trained
reducer = AllReduceReducer(local_parameters(module), group, bucket_bytes=1 << 20, first_bucket_bytes=1 << 18)
optimizer = Optimizer(reducer.parameter_shards(), treatment, config, num_steps=STEPS)
vote = Vote(group, spec.metrics, clip=1.0)
no_scale = torch.ones(())

loader.start(0)
for step in range(STEPS):
    loss, weight = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    micro_batches = loader.take(step)
    for number, loaded in enumerate(micro_batches, start=1):
        torch.manual_seed(derive_seed(SEED, "step", step, loaded.micro_batch.index))
        part = spec.loss(module, loaded.batch)
        reducer.begin_backward(is_last=number == len(micro_batches))  # the last one carries the gradients away
        part.total.backward()
        reducer.end_backward()
        loss += part.total.detach()
        weight += part.weight
    reducer.finish()
    verdict = vote.cast(Ballot(loss, weight, norm_squared(reducer.primary_gradients()), {}), no_scale)
    optimizer.step(step, reducer.gradients(), verdict.factor, verdict.taken)
    reducer.gather_parameters()  # where ranks hold shards of the state, the others need what each has updated
    reducer.release()
    if step % 10 == 9:
        print(f"step {step + 1}  loss {verdict.read().loss:.3f}")
loader.close()
