# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What a report says: counters, the times of passes, what bounds them, the picture, and labels in a profile."""

import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from diffusers_dlo import OffloadHandle, api, apply_distributed_layerwise_offload
from diffusers_dlo.advice import Setting, advise
from diffusers_dlo.device.interface import Platform
from diffusers_dlo.timeline import BlockTiming, Span, covered_ms, overlap_of
from diffusers_dlo.timeline import PassTiming as Pass
from diffusers_dlo.timing import MOST_PASSES
from tests import toys, zoo
from tests.doubles import DelayedPlatform, Mark, TimingMark
from tests.ranks import run_ranks
from tests.test_stream_order import LateBlock, LateStack
from tests.toys import feed, toy


CPU = torch.device("cpu")


def enable(model: torch.nn.Module, platform: Platform, **options) -> OffloadHandle:
    with patch.object(api, "get_platform", lambda device: platform):
        return apply_distributed_layerwise_offload(model, **options)


def run_late(model: LateStack, platform: DelayedPlatform, steps: int) -> list[torch.Tensor]:
    """Forwards that compute on the double's stream."""
    LateBlock.stream = platform.compute
    try:
        with torch.no_grad():
            return [model(feed(step)) for step in range(steps)]
    finally:
        LateBlock.stream = None


def expected(model: torch.nn.Module, steps: int) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(feed(step)) for step in range(steps)]


def equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted))


# Times


@pytest.mark.parametrize("transfer", ("local", "all_gather"))
def test_times_on_streams_that_lag(transfer: str) -> None:
    model, platform = toy(LateStack), DelayedPlatform(CPU, copy_seconds=0.01)
    handle = enable(model, platform, transfer=transfer)
    try:
        run_late(model, platform, 1)
        assert platform.timing_events == 0, "timing is off unless somebody asks"
        report = handle.report()
        assert report.blocks == report.timed_passes == () and report.overlap is None and report.timeline is None
        before = report.h2d_bytes
        with handle.timing():
            assert equal(run_late(model, platform, 3), expected(toy(LateStack), 3))
        report = handle.report()
        assert report.h2d_bytes - before == 3 * sum(block.padded_nbytes(1) for block in handle.plan.blocks)
        assert [block.name for block in report.blocks] == [f"blocks.{i}" for i in range(5)]
        assert all(block.h2d_ms >= 10 and block.gather_ms == 0 for block in report.blocks)
        assert all(block.compute_ms > 1 for block in report.blocks), "each computes for a millisecond at least"
        (timing,) = report.timed_passes
        assert timing.passes == 3 and timing.rank_wait_ms == 0
        assert timing.exposed_ms > 20, "computing takes a tenth of the copies here"
        assert timing.compute_ms + timing.exposed_ms <= timing.pass_ms
        assert timing.transfer_ms == pytest.approx(timing.h2d_ms), "one link, so copies never overlap"
        assert timing.exposed_ms == pytest.approx(sum(block.exposed_ms for block in report.blocks))
        assert 0 <= report.overlap < 0.8 and report.overlap == timing.overlap
        assert 0 < report.host_ms_per_hook < 100
        made = platform.timing_events
        run_late(model, platform, 1)
        assert handle.report().blocks == report.blocks and platform.timing_events == made, "off again"
        with handle.timing():
            run_late(model, platform, 2)
        assert handle.report().timed_passes[0].passes == 2, "each time begins anew"
    finally:
        handle.remove()
    assert handle.report().timed_passes[0].passes == 2, "after removing it is as it was"
    with pytest.raises(ValueError, match="has been disabled. Enable it again"), handle.timing():
        pass


def test_nothing_is_exposed_where_everything_stays_on_the_device() -> None:
    model, platform = toy(LateStack), DelayedPlatform(CPU, copy_seconds=0.01)
    handle = enable(model, platform, transfer="local", num_slots=5)
    try:
        run_late(model, platform, 1)
        with handle.timing():
            assert equal(run_late(model, platform, 2), expected(toy(LateStack), 2))
        report = handle.report()
        (timing,) = report.timed_passes
        assert timing.h2d_ms == timing.transfer_ms == 0 and timing.overlap is report.overlap is None
        assert timing.exposed_ms < 10, "five waits for what has long arrived take less than one copy"
        assert all(block.compute_ms > 1 and block.h2d_ms == 0 for block in report.blocks)
        assert {span.kind for span in report.timeline.spans} == {"wait", "compute"}
    finally:
        handle.remove()


class NeverReadPlatform(DelayedPlatform):
    """Refuses to be asked about events while passes are recorded."""

    recording = True

    def is_done(self, event: Mark) -> bool:
        assert not (self.recording and isinstance(event, TimingMark)), "asked whether it has been reached"
        return super().is_done(event)

    def elapsed(self, start: TimingMark, end: TimingMark) -> float:
        assert not self.recording, "asked for a time"
        return super().elapsed(start, end)


def test_the_last_passes_are_kept_in_events_and_converted_when_asked_for() -> None:
    model, platform = toy(LateStack), NeverReadPlatform(CPU)
    handle = enable(model, platform)
    try:
        with handle.timing():
            run_late(model, platform, MOST_PASSES + 2)
            made = platform.timing_events
            a_pass = 5 * 5 + 2  # a copy, its wait and its computing; nothing to gather with one rank
            assert made <= (MOST_PASSES + 1) * a_pass + 4, "the first pass copies two blocks of the second too"
            run_late(model, platform, 4)
            assert platform.timing_events == made, "those of passes that were pushed out"
            platform.recording = False
            (timing,) = handle.report().timed_passes
            assert (timing.passes, timing.averaged) == (MOST_PASSES + 6, MOST_PASSES)
            assert f"last {MOST_PASSES} of {MOST_PASSES + 6}" in str(handle.report())
            assert handle.report().timed_passes == (timing,), "asked again, the same"
            platform.recording = True
            run_late(model, platform, 1)
            platform.recording = False
        assert handle.report().timed_passes[0].passes == MOST_PASSES + 7
    finally:
        platform.recording = False
        handle.remove()


def test_means_are_those_of_the_last_passes() -> None:
    model, platform = toy(LateStack), DelayedPlatform(CPU, copy_seconds=0.03)
    handle = enable(model, platform)
    try:
        with handle.timing():
            run_late(model, platform, 2)
            slow = handle.report()
            platform.copy_seconds = 0.0
            run_late(model, platform, MOST_PASSES + 1)
        report = handle.report()
        assert all(block.h2d_ms >= 30 for block in slow.blocks) and slow.timed_passes[0].averaged == 2
        assert all(block.h2d_ms < 20 for block in report.blocks), "the slow passes have been pushed out"
        copies = [span for span in report.timeline.spans if span.kind == "copy"]
        assert 4 <= len(copies) <= 6 and all(span.end_ms > 0 for span in copies)
        assert copies[0].begin_ms < report.timeline.pass_ms / 2
    finally:
        handle.remove()


def test_a_pass_that_is_pushed_out_while_the_report_waits_is_left_out() -> None:
    model, platform = toy(LateStack), DelayedPlatform(CPU)
    handle = enable(model, platform)
    wait = platform.synchronize

    def wait_while_others_run() -> None:
        wait()
        platform.synchronize = wait
        run_late(model, platform, 2)

    try:
        with handle.timing():
            run_late(model, platform, MOST_PASSES)
            platform.synchronize = wait_while_others_run
            (timing,) = handle.report().timed_passes
        assert timing.passes == MOST_PASSES and timing.averaged == MOST_PASSES - 1
    finally:
        handle.remove()


def test_without_streams_every_copy_is_exposed() -> None:
    model = toy(toys.Stack, 4)
    handle = apply_distributed_layerwise_offload(model)
    try:
        with torch.no_grad(), handle.timing():
            assert equal([model(feed(step)) for step in range(3)], expected(toy(toys.Stack, 4), 3))
        report = handle.report()
        (timing,) = report.timed_passes
        assert timing.passes == 3 and 0 < timing.h2d_ms <= timing.exposed_ms <= timing.pass_ms
        assert report.overlap < 0.5
        assert [block.name for block in report.blocks] == [f"blocks.{i}" for i in range(4)]
    finally:
        handle.remove()


def test_skipped_and_repeated_calls() -> None:
    model = toy(toys.Repeated)
    model.blocks.append(toys.Block(16, 8))
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather")
    try:
        with torch.no_grad(), handle.timing():
            for step in range(3):
                model(feed(step))
        report = handle.report()
        calls = [span.block for span in report.timeline.spans if span.kind == "compute"]
        first, second, skipped = report.blocks
        assert [calls.count(block.name) for block in report.blocks] == [4, 3, 0]
        assert skipped.compute_ms == skipped.exposed_ms == 0 < skipped.h2d_ms, "it was fetched and not called"
        (timing,) = report.timed_passes
        assert timing.compute_ms == pytest.approx(4 * first.compute_ms + 3 * second.compute_ms)
    finally:
        handle.remove()


def test_a_forward_that_raises_is_left_out() -> None:
    model, reference = toy(toys.Failing, 4), toy(toys.Failing, 4)
    handle = apply_distributed_layerwise_offload(model, transfer="all_gather")
    try:
        with torch.no_grad(), handle.timing():
            for fail_at, error in ((1, ZeroDivisionError), (2, KeyboardInterrupt), (None, None)):
                model.fail_at, model.fail_with = fail_at, error
                if error is not None:
                    with pytest.raises(error):
                        model(feed(0))
                assert handle.report().timed_passes == ()
            for _ in range(2):
                assert torch.equal(model(feed(0)), reference(feed(0)))
        (timing,) = handle.report().timed_passes
        assert timing.passes == 2
        assert len([span for span in handle.report().timeline.spans if span.kind == "compute"]) == 4
    finally:
        handle.remove()


def test_components_are_told_apart_and_two_may_ask_at_once() -> None:
    models = [toy(toys.Stack, 2), toy(toys.Stack, 3, seed=1)]
    handles = [apply_distributed_layerwise_offload(model) for model in models]
    try:
        with torch.no_grad(), handles[0].timing():
            models[0](feed(0))
            with handles[1].timing():
                for model in (models[1], models[0], models[1], models[1]):
                    model(feed(0))
        for handle in handles:
            report = handle.report()
            assert [(timing.component, timing.passes) for timing in report.timed_passes] == [
                ("model", 2),
                ("model#2", 3),
            ]
            assert [block.component for block in report.blocks] == ["model"] * 2 + ["model#2"] * 3
        assert report.timeline.component == "model#2"
        assert handles[0]._engine.timing is None
    finally:
        for handle in handles:
            handle.remove()


def test_a_block_that_is_in_no_slot_is_computed_and_not_exposed() -> None:
    """The engine tells of a block that its lane did not wait for."""
    model = toy(toys.Stack, 1)
    handle = apply_distributed_layerwise_offload(model)
    try:
        with handle.timing():
            timing = handle._engine.timing
            component = handle._parts[0].component
            (block,) = component.blocks
            timing.enter(component)
            timing.arrive(block)
            timing.begin(block)
            timing.end(block)
            timing.leave(component, complete=True)
            timing.end(block)  # which has ended, and its forward too
        report = handle.report()
        assert report.timed_passes[0].passes == 1 and report.blocks[0].compute_ms > 0
    finally:
        handle.remove()


# Ranks


def _timed_on_ranks(rank: int, size: int) -> None:
    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        with handle.timing():
            for step in range(2 + 2 * rank):  # rank 0 transfers for the others at the end
                assert torch.equal(model(feed(step)), reference(feed(step)))
            handle.join()
        report = handle.report()
        (timing,) = report.timed_passes
        assert timing.passes == 2 + 2 * rank and report.passes == timing.passes
        assert report.ghost_passes == 2 * (size - 1 - rank)
        shards = sum(block.shard_nbytes(size) for block in handle.plan.blocks)
        first, second = (block.shard_nbytes(size) for block in handle.plan.blocks[:2])
        copied_ahead = second if rank == size - 1 else 0  # by the rank that computed last
        assert report.h2d_bytes == 2 * size * shards + first + copied_ahead
        assert report.gather_bytes == (size - 1) * (2 * size * shards + first)
        assert [block.name for block in report.blocks] == [f"blocks.{i}" for i in range(5)]
        assert all(block.h2d_ms > 0 and block.gather_ms > 0 and block.compute_ms > 0 for block in report.blocks)
        assert 0 <= report.overlap <= 1 and timing.exposed_ms > 0 and timing.rank_wait_ms > 0
        gathers = [span for span in report.timeline.spans if span.kind == "gather"]
        assert len(gathers) <= 7, "those of passes for other ranks are not among them"
    handle.remove()


def _timed_late_on_ranks(rank: int, size: int) -> None:
    model, platform = toy(LateStack), DelayedPlatform(CPU, seed=rank, copy_seconds=0.004)
    handle = enable(model, platform)
    with handle.timing() if rank == 0 else nullcontext():  # on some ranks only
        assert equal(run_late(model, platform, 3), expected(toy(LateStack), 3))
    handle.join()
    report = handle.report()
    assert len(report.timed_passes) == (rank == 0)
    if rank == 0:
        assert all(block.h2d_ms >= 4 and block.gather_ms > 0 and block.compute_ms > 1 for block in report.blocks)
        assert 0 <= report.overlap < 1 and report.timed_passes[0].exposed_ms > 0
    handle.remove()


def test_times_on_ranks() -> None:
    run_ranks(2, _timed_on_ranks)
    run_ranks(2, _timed_late_on_ranks)


# What bounds a run


WHOLE = Pass("x", 3, 3, 100.0, 40.0, 10.0, 45.0, 95.0, 1.0, 2.0, 0.0)


COPIES_LONG = {"h2d_ms": 90.0, "compute_ms": 30.0, "exposed_ms": 65.0}
GATHERS_LONG = {"h2d_ms": 50.0, "gather_ms": 90.0, "compute_ms": 30.0, "exposed_ms": 65.0}
UNEVEN = {"h2d_ms": 60.0, "compute_ms": 80.0, "exposed_ms": 15.0}
BESIDE = {"h2d_ms": 15.0, "gather_ms": 40.0}
NO_COPIES = {"h2d_ms": 0.0}
REMEDIES = (
    'device_budget="auto"',
    "more ranks",
    'transfer="all_gather"',
    'transfer="local"',
    'gather="auto"',
    'host="packed"',
    "num_slots=3",
    "no setting",
)


def blocks_of(timing: Pass, resident: int = 0) -> list[BlockTiming]:
    """Ten, of which some stay, beside those of another component."""
    streamed = timing.h2d_ms / (10 - resident)
    rest = timing.gather_ms / 10, timing.compute_ms / 10, timing.exposed_ms / 10
    made = [BlockTiming(f"b.{i}", timing.component, 0.0 if i < resident else streamed, *rest) for i in range(10)]
    return [*made, BlockTiming("b.0", "other", 1000.0, 0.0, 1.0, 1.0)]


@pytest.mark.parametrize(
    "changes,setting,bound,remedy",
    (
        ({}, (2, 2, False), "The computing", "no setting"),
        (COPIES_LONG, (2, 2, False), "The host link", 'device_budget="auto"'),
        (COPIES_LONG, (2, 3, True), "The host link", "more ranks"),
        (COPIES_LONG | {"gather_ms": 0.0}, (4, 2, False), "The host link", 'transfer="all_gather"'),
        (COPIES_LONG | {"gather_ms": 0.0}, (1, 2, False), "The host link", 'device_budget="auto"'),
        (GATHERS_LONG | {"h2d_ms": 20.0}, (2, 2, False), "The gather", 'transfer="local"'),
        (GATHERS_LONG, (2, 2, False), "The gather", 'device_budget="auto"'),
        (GATHERS_LONG, (2, 3, True), "The gather", "no setting"),
        (GATHERS_LONG | NO_COPIES, (2, 3, True, True, "collective"), "The gather", 'gather="auto"'),
        (GATHERS_LONG | NO_COPIES, (2, 3, True, True, "pull"), "The gather", "no setting"),
        (UNEVEN, (2, 2, False), "The host link", "num_slots=3"),
        (UNEVEN, (2, 3, False), "The host link", 'device_budget="auto"'),
        (UNEVEN, (2, 2, False, False), "The host link", "no setting"),
        # Coded weights, and weights that could be
        (COPIES_LONG | {"decode_ms": 60.0}, (2, 2, False), "The host link", 'device_budget="auto"'),
        (COPIES_LONG | {"decode_ms": 95.0}, (2, 2, False), "The decoding", 'host="packed"'),
        (COPIES_LONG | {"decode_ms": 95.0}, (2, 2, False, False), "The decoding", 'host="packed"'),
        (GATHERS_LONG | {"decode_ms": 80.0}, (2, 2, False), "The gather", 'device_budget="auto"'),
        (UNEVEN | {"decode_ms": 70.0}, (2, 2, False), "The decoding", "num_slots=3"),
        ({"decode_ms": 6.0, "gather_ms": 0.0}, (2, 2, False), "The computing", 'host="packed"'),
        ({"decode_ms": 4.0, "gather_ms": 0.0}, (2, 2, False), "The computing", "no setting"),
        ({"compute_ms": 40.0, "hook_ms": 45.0}, (2, 2, False), "The host's Python", "no setting"),
        ({"compute_ms": 40.0, "hook_ms": 5.0, "gather_ms": 0.0}, (2, 2, False), "The computing", "no setting"),
        ({"compute_ms": 40.0, "rank_wait_ms": 50.0}, (2, 2, False), "The other ranks", 'transfer="local"'),
        ({"h2d_ms": 60.0, "compute_ms": 40.0, "rank_wait_ms": 50.0}, (2, 2, False), "The other ranks", None),
        # Gathers beside computing
        (BESIDE, (2, 2, False), "The computing", 'transfer="local"'),
        (BESIDE, (4, 2, False), "The computing", 'transfer="local"'),
        (BESIDE, (5, 2, False), "The computing", "no setting"),
        (BESIDE, (2, 3, True), "The computing", 'transfer="local"'),
        (BESIDE | {"gather_ms": 4.0}, (2, 2, False), "The computing", "no setting"),
        (BESIDE | {"gather_ms": 0.0}, (2, 2, False), "The computing", "no setting"),
        (BESIDE, (2, 2, False, False), "The computing", "no setting"),
        (BESIDE | NO_COPIES, (2, 3, True, True, "pull"), "The computing", 'transfer="local"'),
    ),
)
def test_advice(changes: dict[str, float], setting: tuple, bound: str, remedy: str | None) -> None:
    quick, timing = replace(WHOLE, component="quick", passes=1), replace(WHOLE, **changes)
    sentence = advise([quick, timing], blocks_of(timing), Setting(*setting))
    assert sentence.startswith(f"{bound} bound"), sentence
    assert [other for other in REMEDIES if other in sentence] == [remedy] * (remedy is not None), sentence
    assert "a pass of 'x', which takes 100 ms, " in sentence, "of the component that took most of the time"
    assert sentence.endswith(".") and not re.search(r"\. [A-Z]", sentence), "one sentence"


def test_advice_gives_figures() -> None:
    timing = replace(WHOLE, **COPIES_LONG, gather_ms=0.0)
    said = advise([timing], blocks_of(timing), Setting(4, 2, False))
    assert "computing waits for 65 ms, and copies take 90 ms; " in said and "1/4 of a block" in said
    timing = replace(WHOLE, **GATHERS_LONG | {"h2d_ms": 20.0})
    said = advise([timing], blocks_of(timing), Setting(2, 2, False))
    assert "gathers take 90 ms" in said and "whole blocks in about 40 ms" in said
    timing = replace(WHOLE, **BESIDE)
    said = advise([timing], blocks_of(timing), Setting(2, 2, False))
    assert "beside it for 40 ms" in said and "whole blocks in about 30 ms" in said


def test_advice_names_the_codec_where_the_link_bounds() -> None:
    """With whatever else would help there, and nowhere else."""
    for changes, setting, told in (
        (COPIES_LONG, Setting(2, 2, False, codec="ans"), True),
        (COPIES_LONG, Setting(2, 3, True, codec="ans"), True),
        (COPIES_LONG, Setting(2, 2, False), False),
        (COPIES_LONG, Setting(2, 2, False, has_streams=False, codec="ans"), False),
        (GATHERS_LONG, Setting(2, 2, False, codec="ans"), False),
        ({}, Setting(2, 2, False, codec="ans"), False),
    ):
        timing = replace(WHOLE, **changes)
        said = advise([timing], blocks_of(timing), setting)
        assert ("; and so would weights coded by `diffusers-dlo pack --codec ans`" in said) == told, said


class CodecPlatform(DelayedPlatform):
    """A device with a codec of its own."""

    @property
    def codecs(self) -> tuple[str, ...]:
        return ("ans",)


def test_weights_that_could_be_coded() -> None:
    for model, platform, codec in (
        (zoo.build("flux", 2).to(torch.bfloat16), CodecPlatform(CPU), "ans"),
        (zoo.build("flux", 2), CodecPlatform(CPU), ""),
        (toy(LateStack).to(torch.bfloat16), CodecPlatform(CPU), ""),  # no model that `pack` can load
        (zoo.build("flux", 2).to(torch.bfloat16), DelayedPlatform(CPU), ""),
    ):
        handle = enable(model, platform)
        with patch("diffusers_dlo.report.advise", return_value="") as said:
            handle.report()
        handle.remove()
        assert said.call_args.args[2].codec == codec


def test_advice_takes_blocks_that_stay_to_be_copied_too() -> None:
    """With all shards of eight blocks of ten on the devices, two are copied; each rank would copy ten."""
    timing = replace(WHOLE, **BESIDE | {"h2d_ms": 6.0})
    said = advise([timing], blocks_of(timing, resident=8), Setting(2, 3, True))
    assert "whole blocks in about 60 ms" in said
    assert "no setting" in advise([timing], blocks_of(timing, resident=8), Setting(3, 3, True)), "90 ms of 95"
    timing = replace(WHOLE, **GATHERS_LONG | {"h2d_ms": 10.0})
    assert "no setting" in advise([timing], blocks_of(timing, resident=8), Setting(2, 3, True)), "100 ms, not 20"


def test_times_that_cover_each_other_count_once() -> None:
    spans = [Span("copy", "x", "b", *times) for times in ((5.0, 6.0), (0.0, 3.0), (2.0, 4.0), (2.5, 2.75))]
    assert covered_ms(spans) == 5.0
    assert covered_ms([]) == 0.0
    assert overlap_of([]) is None
    assert overlap_of([replace(WHOLE, exposed_ms=9.0)]) == pytest.approx(0.8)
    assert overlap_of([replace(WHOLE, exposed_ms=50.0)]) == 0.0, "a wait may be longer than the transfers"
    twice = [replace(WHOLE, exposed_ms=9.0), replace(WHOLE, passes=1, transfer_ms=0.0, exposed_ms=18.0)]
    assert overlap_of(twice) == pytest.approx(1 - 45 / 135), "weighted by the passes"


# How it looks


def test_print_and_plot(tmp_path) -> None:
    model = toy(toys.Stack, 7)
    handle = apply_distributed_layerwise_offload(model)
    try:
        report = handle.report()
        text = str(report)
        assert text.splitlines()[-1].startswith("Nothing was timed") and "with handle.timing()" in text
        assert "resident" in text and "timed passes" not in text
        with pytest.raises(ValueError, match="nothing was timed"):
            report.plot(tmp_path / "pass.png")
        with torch.no_grad(), handle.timing():
            model(feed(0))
            model(feed(0))
        report = handle.report()
        text = str(report)
        assert "Timed passes: means in ms" in text and "5 of 7 blocks" in text and " ms for the hook" in text
        assert len(re.findall(r"^ model +blocks\.", text, re.MULTILINE)) == 5
        assert text.splitlines()[-1] == report.advice and report.advice.endswith(".")
        report.plot(tmp_path / "pass.png")
        with Image.open(tmp_path / "pass.png") as image:
            assert image.format == "PNG" and image.width > 1000
            assert len(image.convert("RGB").getcolors(1 << 20)) > 10
        report.plot(str(tmp_path / "pass.svg"))
        drawn = (tmp_path / "pass.svg").read_text()
        assert all(f">{name}<" in drawn for name in ("copy", "gather", "compute", "exposed wait"))
        with pytest.raises(ValueError, match="'pass.jpx' has no suffix.*png"):
            report.plot(tmp_path / "pass.jpx")
        with pytest.raises(ValueError, match="no directory '.*nowhere'. Make it first"):
            report.plot(tmp_path / "nowhere" / "pass.png")
        with patch("matplotlib.figure.Figure.savefig", side_effect=OSError("disk full")), pytest.raises(OSError):
            report.plot(tmp_path / "other.png")
        with patch.dict(sys.modules, {"matplotlib": None}):
            with pytest.raises(ImportError, match=r'pip install "diffusers-dlo\[plot\]"'):
                report.plot(tmp_path / "other.png")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["pass.png", "pass.svg"], "nothing half written"
    finally:
        handle.remove()


def test_importing_needs_no_matplotlib() -> None:
    assert not run_ranks(1, _loaded_modules)[0]


def _loaded_modules(rank: int, size: int) -> list[str]:
    apply_distributed_layerwise_offload(toy(toys.Stack, 2)).remove()
    return [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]


# Labels


def _profiled(rank: int, size: int) -> None:
    model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        model(feed(0))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert torch.equal(model(feed(1)), reference(feed(1)))
    seen = {event.name for event in profile.events() if event.name.startswith("dlo: ")}
    names = [f"block 'blocks.{index}' of 'model'" for index in range(3)]
    assert {f"dlo: wait for {name}" for name in names} <= seen
    assert {f"dlo: copy {name}" for name in names[1:]} <= seen, "the first was copied in the pass before"
    assert {f"dlo: gather {name}" for name in names[1:]} <= seen or size == 1
    with patch("torch.profiler.record_function", side_effect=AssertionError("nobody profiles")), torch.no_grad():
        model(feed(2))
    handle.remove()


def test_labels_in_a_profile() -> None:
    run_ranks(1, _profiled)
    run_ranks(2, _profiled)
