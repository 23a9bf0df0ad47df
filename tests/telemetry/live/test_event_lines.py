from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeranks.core.events import (
    Evaluated,
    FlopsCounted,
    HostChanged,
    NoiseSeen,
    PushesDropped,
    RankLost,
    RanksClosed,
    Restored,
    RunEnded,
    RunStarted,
    Saved,
    SharesChanged,
    SlowRank,
    Snapshotting,
    Standstill,
    StepDone,
    Warned,
)
from closeranks.telemetry.live import event_lines
from closeranks.telemetry.live.throughput import MeterReading
from tests.telemetry.conftest import CPU

GPU = RunStarted(
    world_size=1,
    last_step=200,
    device="NVIDIA H200",
    precision="bf16",
    num_params=1_498_482_688,
    num_trainable=3_000_000,
    flops_per_item=9e9,
    datasheet_flops=989e12,
    measured_flops=790e12,
)
DONE = StepDone(step=120, loss=2.13449, lr=3e-4, grad_norm=0.51, memory_bytes=1_288_490_188)
READING = MeterReading(120, 2.13449, 41_234.0, 0.503, 0.631, 1_288_490_188, 42.0)


def fields(
    done: StepDone = DONE, reading: MeterReading = READING, **options: bool
) -> tuple[event_lines.LineField, ...]:
    return event_lines.step_fields(GPU, done, reading, num_skipped=0, detail=options.get("detail", False))


def test_a_step_is_one_dense_line() -> None:
    assert event_lines.join(fields()) == (
        "step   120/200  loss 2.1345  41.2k tok/s  mfu 50.3% (of measured peak 63.1%)  mem 1.2 GiB  eta 0:42"
    )


def test_cost_and_the_uncertainty_of_what_is_left() -> None:
    known = replace(READING, eta_s=742.0, eta_error_s=31.0, cost="$12.40", hfu=0.66)
    text = event_lines.join(fields(reading=known))
    assert text.endswith("eta 12:22 ±0:31  cost $12.40")
    assert "mfu 50.3%  hfu 66.0% (of measured peak 63.1%)" in text
    assert event_lines.join(event_lines.fit(fields(reading=known), 80)) == (
        "step   120/200  loss 2.1345  41.2k tok/s  mfu 50.3%  eta 12:22  cost $12.40"
    )
    assert "±" not in event_lines.join(fields(reading=replace(known, eta_error_s=0.4)))


def test_without_a_datasheet_the_share_of_the_measured_peak_stands_alone() -> None:
    text = event_lines.join(fields(reading=replace(READING, mfu=None, peak_share=0.41)))
    assert "  peak 41.0%  " in text
    assert "mfu" not in text


def test_details_and_metrics_are_appended() -> None:
    text = event_lines.join(fields(replace(DONE, metrics={"accuracy": 0.9612, "click_loss": 0.31}), detail=True))
    assert text.endswith("lr 3.00e-04  grad 0.5100  acc 0.961  click_loss 0.310")


def test_what_is_not_known_is_left_out() -> None:
    unknown = MeterReading(120, 2.1, None, None, None, 0, None)
    assert event_lines.join(fields(replace(DONE, memory_bytes=0, seconds=3.2), unknown)) == (
        "step   120/200  loss 2.1345  first step 3.2 s"
    )


@given(st.integers(0, 160))
def test_a_line_fits_its_width_or_is_down_to_step_and_loss(width: int) -> None:
    whole = fields(replace(DONE, metrics={"accuracy": 0.9}))
    kept = event_lines.fit(whole, width)
    assert len(event_lines.join(kept)) <= width or [field.label for field in kept] == ["step", "loss"]
    assert kept == tuple(field for field in whole if field in kept)
    if width >= len(event_lines.join(whole)):
        assert kept == whole


def test_the_measured_peak_is_spared_before_the_time_to_go() -> None:
    assert event_lines.join(event_lines.fit(fields(), 80)) == (
        "step   120/200  loss 2.1345  41.2k tok/s  mfu 50.3%  mem 1.2 GiB  eta 0:42"
    )


def test_a_skipped_step_says_why_and_what_the_scale_is_now() -> None:
    skipped = replace(DONE, taken=False, loss_scale=32768.0)
    assert event_lines.skipped_line(replace(GPU, precision="fp16"), skipped, 1) == (
        "step   120/200  skipped: gradients not finite, loss scale now 32768"
    )
    assert event_lines.skipped_line(GPU, skipped, 4).endswith(
        "gradients not finite, the update was left out (4 so far)"
    )


def test_a_run_that_skips_on_and_on_is_not_a_flood() -> None:
    assert [num for num in range(1, 100) if event_lines.is_logged(num)] == [1, 2, 3, 4, 8, 16, 32, 64]


def test_the_start_says_what_runs_and_once_why_there_is_no_mfu() -> None:
    assert event_lines.started_line(GPU) == (
        "1.50B parameters (3.00M of them trained) on 1 worker (NVIDIA H200, bf16), steps 1 to 200"
    )
    assert event_lines.started_line(CPU) == (
        "1.20M parameters on 2 workers (Intel Xeon Processor, float32), steps 1 to 40; "
        "no datasheet for this CPU: share of the measured matmul peak is shown instead of MFU"
    )
    again = event_lines.started_line(replace(CPU, generation=2, first_step=12))
    assert again == "generation 2: 1.20M parameters on 2 workers (Intel Xeon Processor, float32), steps 13 to 40"


@pytest.mark.parametrize(
    ("batch", "micro", "words"),
    [
        (32, 4, "32 = 8 micro-batches of 4"),
        (30, 4, "30 = 7 micro-batches of 4 and one of 2"),
        (6, 4, "6 = 1 micro-batch of 4 and one of 2"),
        (8, 8, "8 = one micro-batch"),
    ],
)
def test_the_start_says_how_a_step_is_cut(batch: int, micro: int, words: str) -> None:
    started = replace(CPU, global_batch=batch, micro_batch=micro)
    assert f"steps 1 to 40, global batch {words}; " in event_lines.started_line(started)
    assert "global batch" not in event_lines.started_line(replace(started, generation=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"datasheet_flops": None, "measured_flops": None}, "for this device, so"),
        ({"datasheet_flops": None}, "measured matmul peak is shown instead"),
    ],
)
def test_a_missing_peak_is_explained(changes: dict[str, object], words: str) -> None:
    assert words in event_lines.started_line(replace(GPU, **changes))


def test_counted_flops_are_told_or_why_there_are_none() -> None:
    started = replace(GPU, flops_per_item=0.0, item="sample")
    assert "telemetry.count_flops = true counts them" in event_lines.started_line(started)
    counted = FlopsCounted(1.234e9)
    assert event_lines.flops_line(started, counted) == "1.23B FLOPs per sample, forward and backward"
    line = event_lines.flops_line(replace(started, datasheet_flops=None), counted)
    assert line.endswith("share of the measured matmul peak is shown instead of MFU")
    why = event_lines.flops_line(started, FlopsCounted(why="it reads a value"))
    assert why == "no MFU is shown, as this model's FLOPs could not be counted: it reads a value"


@pytest.mark.parametrize(
    ("size", "latency_s", "rate", "words"),
    [
        (4.0, 2.1e-4, 310e6, "buckets of 4 MiB: measured 0.21 ms and 310 MB/s between ranks"),
        (0.25, 3.14e-6, 41.2e9, "buckets of 0.25 MiB: measured 3.1 us and 41.2 GB/s between ranks"),
        (64.0, 0.02, 1.25e6, "buckets of 64 MiB: measured 20 ms and 1.25 MB/s between ranks"),
        (64.0, 0.3, 1e9, "buckets of 64 MiB: measured 0.3 s and 1 GB/s between ranks"),
        (25.0, None, None, ""),
    ],
)
def test_buckets_that_were_measured_are_told(
    size: float, latency_s: float | None, rate: float | None, words: str
) -> None:
    found = replace(GPU, bucket_mib=size, link_latency_s=latency_s, link_bytes_per_s=rate)
    assert event_lines.buckets_line(found) == words


def test_other_events_are_one_line_each() -> None:
    evaluated = Evaluated(step=100, loss=1.98123, metrics={"accuracy": 0.961}, seconds=0.8)
    assert event_lines.evaluated_line(evaluated) == "eval at step 100  loss 1.9812  acc 0.961  (0.8 s)"
    assert event_lines.saved_line(Saved(100, "runs/x", 1 << 20, 0.2)) == "saved step 100: runs/x (1.0 MiB, 0.2 s)"
    assert event_lines.warned_line(Warned("mind the gap", step=3)) == "warning at step 3: mind the gap"
    assert event_lines.ended_line(RunEnded(5, "drained", 3.0)) == "asked to stop: ended at step 5 after 3.0 s"
    assert event_lines.ended_line(RunEnded(5, "evicted", 3.0)) == "evicted at step 5 after 3.0 s"


def test_the_noise_scale_says_what_it_means_for_the_batch() -> None:
    assert event_lines.noise_line(NoiseSeen(20, 483.2, 64)) == (
        "noise scale about 480 samples; a step now has 64: a larger batch still helps"
    )
    assert event_lines.noise_line(NoiseSeen(20, 483.2, 4096)) == (
        "noise scale about 480 samples; a step now has 4096: batches beyond 480 gain little"
    )
    assert "about 0.46 samples" in event_lines.noise_line(NoiseSeen(20, 0.4567, 8))
    assert "about 1.23M samples" in event_lines.noise_line(NoiseSeen(20, 1_234_567.0, 8))
    assert "still too noisy" in event_lines.noise_line(NoiseSeen(20, None, 8))


LOST = RankLost(0, 1, "", 40, "killed", "killed by SIGKILL", 0.01)


def test_the_line_of_a_fault() -> None:
    assert event_lines.closing_line(LOST) == "rank 1 lost at step 40 (killed by SIGKILL); closing ranks ..."
    closed = RanksClosed(1, 40, 0.93, 1, 2)
    assert (
        event_lines.closed_line(LOST, closed, 2) == "rank 1 lost at step 40 (killed by SIGKILL); closed ranks in 0.9 s"
    )
    more = event_lines.closed_line(LOST, replace(closed, num_redone=4, world_size=1, layout="data=1"), 2)
    assert more.endswith("; closed ranks in 0.9 s, 4 steps redone, now on 1 worker (data=1)")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            RankLost(rank=2, kind="exception", cause="KeyError: 'x'\nmore"),
            "rank 2 lost before the first step (KeyError: 'x')",
        ),
        (RankLost(1, 2, kind="hang"), "rank 2 lost while closing ranks"),
        (
            RankLost(rank=-1, host="b", step=7, kind="host", cause="silent for 3 s"),
            "host b lost at step 7 (silent for 3 s)",
        ),
        (RankLost(rank=-1, step=7, kind="zygote"), "the zygote lost at step 7"),
        (RankLost(rank=1, step=7, kind="slow"), "rank 1 is replaced at step 7"),
        (RankLost(rank=1, step=7, kind="preempted", cause="SIGTERM"), "rank 1 leaves at step 7 (SIGTERM)"),
        (RankLost(rank=-1, host="b", step=7, kind="preempted"), "host b leaves at step 7"),
        (
            RankLost(rank=-1, step=7, kind="resize", cause="host b joined"),
            "the workers regroup at step 7 (host b joined)",
        ),
        (RankLost(rank=-1, step=7, kind="hang"), "the workers lost at step 7"),
    ],
)
def test_who_was_lost_and_how(event: RankLost, words: str) -> None:
    assert event_lines.lost_words(event) == words


def test_of_a_kill_the_line_says_what_and_not_what_to_look_for() -> None:
    told = "killed by SIGKILL; if nobody sent it, the kernel's out-of-memory killer did: see dmesg"
    assert event_lines.lost_words(replace(LOST, cause=told)) == "rank 1 lost at step 40 (killed by SIGKILL)"
    raised = replace(LOST, kind="exception", cause="ValueError: a; b")
    assert event_lines.lost_words(raised) == "rank 1 lost at step 40 (ValueError: a; b)"


def test_a_long_cause_is_cut() -> None:
    assert len(event_lines.lost_words(replace(LOST, cause="x" * 1000))) < 200


def test_events_about_faults_are_one_line_each() -> None:
    assert event_lines.restored_line(Restored(39, "peer", 1, 0.12)) == (
        "generation 1 continues after step 39, from a peer's memory (0.1 s)"
    )
    assert event_lines.snapshots_line(Snapshotting(3, 1, 30 << 20, 0.002, "replica")) == (
        "state kept in memory every step (30.0 MiB a rank, a second copy in each replica; 2 ms a copy)"
    )
    assert "every 4 steps (1.0 GiB a rank, no second copy;" in event_lines.snapshots_line(
        Snapshotting(3, 4, 1 << 30, 0.1, "none")
    )
    assert event_lines.slow_line(SlowRank(2, "b", 50, 1.83, 0.33, 0.18)) == (
        "rank 2 on b is slow at step 50: 1.8 times the others (0.3 s a micro-batch, the others 0.2 s)"
    )
    assert event_lines.shares_line(SharesChanged(20, "data rank", [10, 10, 10, 2], [8, 8, 8, 8])) == (
        "from step 21 on data rank 3 takes 2 of 32 micro-batches instead of 8, data ranks 0 to 2 take 10 instead of 8"
    )
    assert event_lines.shares_line(SharesChanged(8, "replica", [3, 4, 4, 1], [3, 3, 3, 3])) == (
        "from step 9 on replica 3 takes 1 of 12 micro-batches instead of 3, replicas 1, 2 take 4 instead of 3"
    )
    many = SharesChanged(1, "data rank", [1, 9, 8, 7, 6], [6, 5, 5, 5, 5])
    assert event_lines.shares_line(many).endswith("data rank 2 takes 8 instead of 5, and 2 others change")
    assert event_lines.host_line(HostChanged("b", "joined", "", 2)) == "host b joined with 2 workers"
    assert event_lines.host_line(HostChanged("b", "quarantined", "5 faults in an hour")) == (
        "host b is quarantined: 5 faults in an hour"
    )


def test_a_standstill_has_its_cause_first_and_then_who_waits() -> None:
    told = Standstill(0, 7, 5.26, 1, "b", "loader", "waits for data", ["rank 0: waiting for rank 1", "rank 1: reads"])
    assert event_lines.standstill_lines(told) == [
        "nothing has moved for 5.3 s at step 7: rank 1 waits for data",
        "  rank 0: waiting for rank 1",
        "  rank 1: reads",
    ]
    failed = Standstill(kind="branch", cause="the ranks took different branches")
    assert event_lines.standstill_lines(failed) == [
        "collectives mismatch before the first step: the ranks took different branches"
    ]


def test_who_was_late() -> None:
    assert event_lines.dropped_line(PushesDropped(60, [9, 0, 12], [400, 560, 480], 252)) == (
        "worker 2 was too late for 12 of 60 steps, worker 0 for 9: 252 of 1,440 samples were taken by a later step"
    )
    many = PushesDropped(8, [1, 2, 3, 4, 5], [10] * 5, 30, waiting=6)
    assert event_lines.dropped_line(many) == (
        "worker 4 was too late for 5 of 8 steps, worker 3 for 4, worker 2 for 3, 2 others for fewer: "
        "30 of 50 samples were taken by a later step, 6 are still to be taken"
    )
