# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Ranks that are killed, stopped or interrupted: the others finish their work, exactly, or hear who was lost. Ranks are
plain processes here, since launchers end the survivors of a killed one themselves.
"""

import gc
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.utils import logging as diffusers_logging
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.distributed import collective_wait, control
from diffusers_dlo.distributed.control import RankLost
from diffusers_dlo.gather_lane import GatherLane
from diffusers_dlo.host.packed import PackedStore
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy


pytestmark = pytest.mark.timeout(120)


class Heard(logging.Handler):
    """What the package logs in this process, from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        diffusers_logging.add_handler(self)
        logging.getLogger("diffusers_dlo").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def saying(self, text: str) -> list[str]:
        return [heard for heard in self.texts if text in heard]


def in_block(model: torch.nn.Module, index: int, action: Callable[[], None]) -> None:
    """Has the block do something in the middle of its next forward, once."""

    def act(*_: object) -> None:
        handle.remove()
        action()

    handle = model.blocks[index].up.register_forward_pre_hook(act)


def left_behind() -> list[str]:
    """Threads of the package."""
    return [thread.name for thread in threading.enumerate() if "diffusers_dlo" in thread.name]


def _killed(rank: int, size: int, where: str, host: str, path: str) -> tuple[float, list[str], str]:
    heard = Heard()
    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    if host == "mapped":
        model.load_state_dict(load_file(path), assign=True)
    handle = apply_distributed_layerwise_offload(model, host=host, timeout=60.0, grace=0.2)
    assert handle.report().host_kind == host
    with torch.no_grad():
        assert torch.equal(model(feed(0)), reference(feed(0)))
        if rank == 1:
            if where == "in a block":
                in_block(model, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
                model(feed(1))
            elif where == "with a child":  # which keeps its sockets open
                if os.fork() == 0:
                    time.sleep(8)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        for step in range(4):
            assert torch.equal(model(feed(step)), reference(feed(step))), step
        taken = time.monotonic() - start
        report = handle.report()
        handle.join()
        handle.remove()
        assert torch.equal(model(feed(9)), reference(feed(9)))
    assert left_behind() == []
    return taken, heard.saying("goes on by itself"), report.transfer


@pytest.mark.parametrize(
    "size,host,where",
    (
        (2, "packed", "in a block"),
        (2, "packed", "with a child"),
        (2, "mapped", "in a block"),
        (3, "packed", "in a block"),
        (3, "packed", "between forwards"),
        pytest.param(3, "packed", "with a child", marks=pytest.mark.slow),
        pytest.param(3, "mapped", "in a block", marks=pytest.mark.slow),
    ),
)
def test_survivors_of_a_killed_rank_finish_by_themselves(size: int, host: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(toy(toys.Stack, 5).state_dict(), path)
    results = run_ranks(size, _killed, where, host, str(path), expect_death=(1,))
    for rank in set(range(size)) - {1}:
        taken, warnings, transfer = results[rank]
        assert taken < (15 if where != "with a child" else 7) and transfer == "local"
        assert len(warnings) == 1 and "rank 1" in warnings[0], warnings


def _killed_pinned(rank: int, size: int) -> list[str]:
    model = toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model, host="pinned", timeout=60.0, grace=0.2)
    with torch.no_grad():
        model(feed(0))
        if rank == 1:
            in_block(model, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
            model(feed(1))
        start = time.monotonic()
        texts = []
        for _ in range(2):  # at once, and at each later call
            with pytest.raises(RuntimeError) as caught:
                for step in range(3):
                    model(feed(step))
            texts.append(str(caught.value))
        with pytest.raises(RuntimeError, match="weights are lost.*Load the model again"):
            handle.remove()
        assert time.monotonic() - start < 15
        with pytest.raises(RuntimeError):
            model(feed(0))
    assert left_behind() == []
    return texts


@pytest.mark.parametrize("size", (2, 3))
def test_where_shards_are_lost_survivors_hear_of_whom(size: int) -> None:
    results = run_ranks(size, _killed_pinned, expect_death=(1,))
    for rank in set(range(size)) - {1}:
        for text in results[rank]:
            assert "rank 1 (it was at a forward of 'model')" in text and "pinned" in text, text


def _stopped(rank: int, size: int, seconds: float, timeout: float) -> tuple[list[str], list[str], str]:
    heard = Heard()
    control.LATE_SECONDS = 1.0
    collective_wait.LATE_SECONDS = 1.0
    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model, timeout=timeout, grace=0.2)
    with torch.no_grad():
        assert torch.equal(model(feed(0)), reference(feed(0)))
        dist.barrier()
        if rank == 1:
            me = os.getpid()
            if os.fork() == 0:
                time.sleep(seconds)
                os.kill(me, signal.SIGCONT)
                os._exit(0)
            os.kill(me, signal.SIGSTOP)
        for step in range(4):
            assert torch.equal(model(feed(step)), reference(feed(step))), step
    report = handle.report()
    handle.remove()
    assert left_behind() == []
    return heard.saying("stopped (SIGSTOP)"), heard.saying("goes on by itself"), report.transfer


def test_a_stopped_rank_is_named_and_waited_for() -> None:
    named, alone, transfer = run_ranks(2, _stopped, 3.0, 60.0)[0]
    assert len(named) == 1 and "rank 1" in named[0]
    assert not alone and transfer == "all_gather"


def test_a_rank_that_is_stopped_for_longer_than_the_timeout_is_left_behind_and_goes_on_later() -> None:
    results = run_ranks(2, _stopped, 8.0, 3.0)
    named, alone, transfer = results[0]
    assert transfer == "local" and len(alone) == 1 and "rank 1" in alone[0]
    assert results[1][2] == "local"


class Pest:
    """Sends SIGINT to this process, at points drawn at random, for a few seconds; `armed` says whether it raises."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.armed = False
        self.raised = 0
        self.until = time.monotonic() + seconds
        self._rng = random.Random(seed)
        signal.signal(signal.SIGINT, self._handle)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _handle(self, *_: object) -> None:
        if self.armed:
            self.armed = False  # so that none comes while the one before is being caught
            self.raised += 1
            raise KeyboardInterrupt

    def _run(self) -> None:
        while time.monotonic() < self.until:
            time.sleep(self._rng.random() * 0.03)
            os.kill(os.getpid(), signal.SIGINT)


def _interrupted(rank: int, size: int, seed: int, culprits: tuple[int, ...]) -> int:
    """Ctrl-C at points drawn at random, on some ranks; they catch it and go on."""
    model, reference = toy(toys.Stack, 4), toy(toys.Stack, 4)
    handle = apply_distributed_layerwise_offload(model, grace=0.05, timeout=60.0)
    with torch.no_grad():
        expected = [reference(feed(step)) for step in range(7)]
    pest = Pest(seed, 3.0)
    if rank in culprits:
        pest.thread.start()
    step = 0
    while time.monotonic() < pest.until or pest.thread.is_alive():
        try:
            pest.armed = True
            with torch.no_grad():
                output = model(feed(step % 7))
            pest.armed = False
            assert torch.equal(output, expected[step % 7]), step
            step += 1
        except KeyboardInterrupt:
            pass
    pest.armed = False
    assert handle.report().transfer == "all_gather"
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(feed(3)), expected[3])
    return pest.raised


@pytest.mark.parametrize(
    "size,culprits",
    (
        (2, (0,)),
        pytest.param(3, (1,), marks=pytest.mark.slow),
        pytest.param(2, (0, 1), marks=pytest.mark.slow),
        (3, (0, 1, 2)),
    ),
)
def test_keyboard_interrupts_at_any_point(size: int, culprits: tuple[int, ...]) -> None:
    results = run_ranks(size, _interrupted, 10 * size + len(culprits), culprits)
    assert all((raised > 0) == (rank in culprits) for rank, raised in enumerate(results)), results


def _interrupted_and_idle(rank: int, size: int, rooted: bool) -> tuple[float, float]:
    """Ctrl-C in a block, after which the rank does something else: its part of the lap is done all the same."""
    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    apply_distributed_layerwise_offload(model, grace=0.3)
    with torch.no_grad():
        if rank == 1:

            def interrupt() -> None:
                raise KeyboardInterrupt

            in_block(model, 1, interrupt)
            with pytest.raises(KeyboardInterrupt):
                if rooted:
                    model(feed(0))
                else:
                    x = feed(0)
                    for block in model.blocks:
                        x = block(x)
            time.sleep(3)
            woke = time.monotonic()  # one clock for all processes
            assert torch.equal(model(feed(2)), reference(feed(2)))
            return 0.0, woke
        for step in range(3):
            assert torch.equal(model(feed(step)), reference(feed(step)))
        return time.monotonic(), 0.0


@pytest.mark.parametrize("rooted", (True, False))
def test_an_interrupted_lap_is_completed_for_the_others(rooted: bool) -> None:
    (done, _), (_, woke) = run_ranks(2, _interrupted_and_idle, rooted)
    assert done < woke


def _blocks_without_a_root(rank: int, size: int) -> tuple[float, float]:
    """Blocks that are called one by one, and then no more: nothing says that the lap is over, but time."""
    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    apply_distributed_layerwise_offload(model, grace=0.3)
    with torch.no_grad():
        if rank == 1:
            for index in (0, 1):
                assert torch.equal(model.blocks[index](feed(0)), reference.blocks[index](feed(0)))
            time.sleep(3)
            return 0.0, time.monotonic()
        for step in range(3):
            assert torch.equal(model(feed(step)), reference(feed(step)))
        return time.monotonic(), 0.0


def test_a_lap_that_is_left_without_a_word_is_completed_after_a_grace() -> None:
    (done, _), (_, woke) = run_ranks(2, _blocks_without_a_root)
    assert done < woke


def _spoilt(rank: int, size: int, where: str) -> str:
    """A device had begun to compute with a block that will never arrive: the rank hears of it wherever it is."""
    heard = Heard()
    model = toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model, grace=0.2)
    with torch.no_grad():
        model(feed(0))
        if rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        GatherLane.is_intact = lambda lane: False  # what a device with streams would say
        if (
            where == "in the engine"
        ):  # which is where the main thread is when the loss is noticed, and asks for nothing
            release = GatherLane.release

            def slowly(lane: GatherLane, block: object) -> None:
                release(lane, block)
                time.sleep(3)

            GatherLane.release = slowly
        with pytest.raises(RankLost) as caught:
            if where == "in the engine":
                model.blocks[0](feed(0))
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                time.sleep(0.01)
        for _ in range(2):
            with pytest.raises(RankLost, match="may be wrong"):
                model(feed(1))
        handle.remove()
    assert len(heard.saying("may be wrong")) >= 1
    return str(caught.value)


@pytest.mark.parametrize("where", ("in a loop of the user's", "in the engine"))
def test_what_may_be_wrong_is_an_error_wherever_the_rank_is(where: str) -> None:
    text = run_ranks(2, _spoilt, where, expect_death=(1,))[0]
    assert "rank 1" in text and "What rank 0 computed meanwhile may be wrong" in text


def _interrupted_join(rank: int, size: int) -> None:
    """Ctrl-C in a join that the other rank then completes; both disable, for which they have to agree anew."""
    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model, grace=0.2, timeout=30.0)
    if rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            handle.join()
        time.sleep(2)
    else:
        time.sleep(1.5)
        handle.join()
    start = time.monotonic()
    handle.remove()
    assert time.monotonic() - start < 15
    with torch.no_grad():
        assert torch.equal(model(feed(3)), reference(feed(3)))


def test_an_interrupted_join_that_was_completed_does_not_disable() -> None:
    run_ranks(2, _interrupted_join)


def _leaves_alone_who_waits_for_others(rank: int, size: int) -> None:
    """
    Rank 0 is at its end while rank 1 waits for long in a collective that rank 0 has no part in: it is needed after.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))  # rows 0, 1 and 2, 3
    pair = dist.new_group([1, 2])
    model, reference = toy(toys.Stack, 5), toy(toys.Stack, 5)
    handle = apply_distributed_layerwise_offload(model, mesh=mesh, grace=0.2, timeout=60.0)
    if rank == 2:
        time.sleep(9)
    if rank in (1, 2):
        dist.barrier(group=pair)
    if rank == 1:
        with torch.no_grad():
            assert torch.equal(model(feed(3)), reference(feed(3)))
        assert handle.report().transfer == "all_gather"


def test_a_rank_stays_for_one_that_waits_for_somebody_else() -> None:
    run_ranks(4, _leaves_alone_who_waits_for_others)


def _drops_and_enables(rank: int, size: int) -> None:
    """Models that are dropped, as collectors find them, while the next one is enabled."""
    close = PackedStore.close
    PackedStore.close = lambda store: (time.sleep(0.05), close(store))[1]  # takes its time, on whatever thread
    for step in range(6):
        model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
        object.__setattr__(model, "itself", model)
        handle = apply_distributed_layerwise_offload(model, host="packed", grace=0.2, timeout=30.0)
        with torch.no_grad():
            assert torch.equal(model(feed(step)), reference(feed(step)))
        assert handle.report().transfer == "all_gather"
        handle, model = None, None
    deadline = time.monotonic() + 20
    while left_behind() and time.monotonic() < deadline:
        gc.collect()  # as it happens sooner or later
        time.sleep(0.05)
    assert left_behind() == []


@pytest.mark.parametrize("size", (2, 3))
def test_a_dropped_model_makes_room_for_the_next(size: int) -> None:
    run_ranks(size, _drops_and_enables)


def _dropped_before_the_loss(rank: int, size: int) -> None:
    """A model that only this rank has dropped goes with the group, and not on alone."""
    first, second, reference = (toy(toys.Stack, 5) for _ in range(3))
    handles = [apply_distributed_layerwise_offload(model, host="packed", grace=0.2) for model in (first, second)]
    store = handles[0]._store
    with torch.no_grad():
        for model in (first, second):
            assert torch.equal(model(feed(rank)), reference(feed(rank)))
        handles[1].join()
        if rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        engine = handles[1]._engine
        first, model, handles[0] = None, None, None
        gc.collect()
        assert engine.names == ["model", "model#2"] and store.shared_nbytes > 0  # the other rank may ask for it
        deadline = time.monotonic() + 15
        while handles[1].report().transfer == "all_gather" and time.monotonic() < deadline:
            assert torch.equal(second(feed(3)), reference(feed(3)))
        assert engine.names == ["model#2"] and store.shared_nbytes == 0
    handles[1].remove()


def test_a_model_that_was_dropped_before_a_loss_goes_with_the_group() -> None:
    run_ranks(2, _dropped_before_the_loss, expect_death=(1,))


def _killed_before_it_connects(rank: int, size: int) -> float:
    """Once all ranks have introduced themselves, and before any is watched."""
    from diffusers_dlo.distributed import group

    if rank == 1:
        group.connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    begun = time.monotonic()
    with pytest.raises(RankLost, match="rank 1 has ended"):
        apply_distributed_layerwise_offload(toy(toys.Stack, 2))
    return time.monotonic() - begun


def test_a_rank_that_is_killed_before_it_connects_is_not_waited_for() -> None:
    assert run_ranks(2, _killed_before_it_connects, expect_death=(1,))[0] < 30


def _slow_to_connect(rank: int, size: int) -> None:
    """Where the system does not tell of processes."""
    from diffusers_dlo.distributed import group

    def refuse(*_: object) -> int:
        raise OSError("not to be had here")

    def connect_late(*args: Any, connect: Any = group.connect) -> Any:
        time.sleep(0.3)
        return connect(*args)

    os.pidfd_open = refuse
    if rank == 1:
        group.connect = connect_late
    model = toy(toys.Stack, 2)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        assert torch.equal(model(feed(0)), toy(toys.Stack, 2)(feed(0)))
    handle.remove()


@pytest.mark.parametrize("size", (2, 3))
def test_a_rank_that_connects_late_is_waited_for_whatever_is_known_of_it(size: int) -> None:
    run_ranks(size, _slow_to_connect)
