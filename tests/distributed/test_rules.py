# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
The rules of [Note: Ghost service], by number: each case places an event exactly where its rule is needed. Without the
rule, ranks wait for each other until a bound of some seconds, or lose each other. What `test_faults.py` pins (the
lease inside a block and after a grace, pidfd against forked children) is not repeated.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from diffusers_dlo import OffloadHandle, apply_distributed_layerwise_offload
from diffusers_dlo.attachment import Attachment
from diffusers_dlo.distributed import pass_service
from diffusers_dlo.distributed.control import ControlMesh
from diffusers_dlo.distributed.gather import ShardGather
from diffusers_dlo.distributed.turn import Turn
from diffusers_dlo.gather_lane import GatherLane
from tests import toys
from tests.distributed.test_faults import Heard, in_block, left_behind
from tests.ranks import run_ranks
from tests.toys import feed, toy


pytestmark = pytest.mark.timeout(60)

BOUND = 12.0
"""Seconds after which ranks count as waiting for each other; with the rules, none waits for two."""
NEVER = 4 * BOUND


def begin(count: int = 5, **options: Any) -> tuple[Any, nn.Module, OffloadHandle]:
    model, reference = toy(toys.Stack, count), toy(toys.Stack, count)
    options = {"grace": 0.05, "timeout": NEVER, **options}
    return model, reference, apply_distributed_layerwise_offload(model, **options)


def run(model: nn.Module, reference: nn.Module, seed: int) -> None:
    with torch.no_grad():
        assert torch.equal(model(feed(seed)), reference(feed(seed))), seed


def run_to(error: type[BaseException], model: nn.Module, match: str | None = None) -> None:
    with torch.no_grad(), pytest.raises(error, match=match):
        model(feed(0))


def end(handle: OffloadHandle) -> None:
    assert handle.report().transfer == "all_gather"  # nobody was lost
    handle.remove()


def say(key: str, value: object = "") -> None:
    dist.distributed_c10d._get_default_store().set(key, str(value))


def hear(*keys: str) -> bytes:
    store = dist.distributed_c10d._get_default_store()
    store.wait(list(keys), timedelta(seconds=BOUND))
    return store.get(keys[-1])


def once(owner: type, name: str, action: Callable[[], object], after: bool = False) -> None:
    """Has `action` happen before, or after, the next call of a method in this process."""
    original, due = getattr(owner, name), [action]

    def replaced(*args: Any, **kwargs: Any) -> Any:
        mine = due.pop() if due else None
        if mine is not None and not after:
            mine()
        result = original(*args, **kwargs)
        if mine is not None and after:
            mine()
        return result

    setattr(owner, name, replaced)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    say("failed")
    raise RuntimeError("no such luck")


def wakes_up_first(rank: int, size: int) -> None:
    """The service thread is awake, and has looked, before the one that woke it goes on."""
    pass_service._IDLE_SECONDS = NEVER
    if rank == 1:
        once(ControlMesh, "wake", lambda: time.sleep(0.3), after=True)
    model, reference, handle = begin()
    if rank == 1:
        run(model, reference, 0)
        say("done")
    hear("done")
    end(handle)


def loses_a_round(rank: int, size: int) -> None:
    """Both ask in one round, for different components; who is served first does not start another round."""
    pass_service._IDLE_SECONDS = NEVER
    pairs = [begin(3), begin(4)]
    once(Turn, "request", lambda: say(f"asks {rank}"))
    once(Turn, "answer", lambda: (hear("asks 0", "asks 1"), time.sleep(0.3)))
    run(*pairs[rank][:2], 0)
    say(f"done {rank}")
    hear("done 0", "done 1")
    for _, _, handle in pairs:
        end(handle)


def speaks_in_a_round(rank: int, size: int, what: str) -> None:
    """What the main thread says when its service has just answered GHOST, in a round that nobody follows up."""
    answered, said = threading.Event(), threading.Event()

    def hold() -> None:
        answered.set()
        assert said.wait(BOUND)

    if rank == 1:
        once(ControlMesh, "wake", said.set, after=True)
    model, reference, handle = begin()
    if rank == 1:
        once(ControlMesh, "exchange", hold)
        assert answered.wait(BOUND)
        if what == "ask":
            run(model, reference, 0)
    handle.join()
    end(handle)


def interrupted_between_blocks(rank: int, size: int) -> None:
    """No block is held, and no grace would end."""
    model, reference, handle = begin(grace=NEVER)
    if rank == 1:
        hook = model.blocks[2].register_forward_pre_hook(lambda *_: interrupt(), prepend=True)
        run_to(KeyboardInterrupt, model)
        hook.remove()
        hear("done")
    else:
        run(model, reference, 0)
        say("done")
    run(model, reference, 1)
    end(handle)


def longer_than_a_grace(rank: int, size: int, where: str) -> None:
    """Neither a long block nor others that are waited for, with no block held, cost a rank its lap."""
    model, reference, handle = begin(grace=0.5)
    dist.barrier()
    if rank == 0:
        if where == "gather":
            once(GatherLane, "finish_lap", lambda: time.sleep(1.5))
        hear("done")
    else:
        if where == "block":
            in_block(model, 2, lambda: time.sleep(1.5))
        else:
            model.order = reference.order = (4,)
        run(model, reference, 0)
        assert handle.report().passes == 1
        say("done")
    end(handle)


def interrupted_in_a_fetch(rank: int, size: int) -> None:
    """Between a gather and its bookkeeping."""
    model, reference, handle = begin(grace=NEVER)
    if rank == 1:
        once(ShardGather, "start", interrupt, after=True)
        run_to(KeyboardInterrupt, model)
    else:
        run(model, reference, 0)
    run(model, reference, 1)
    end(handle)


def interrupted_at_a_wait(rank: int, size: int, where: str) -> None:
    """What is waited for comes only after the interrupt."""
    model, reference, handle = begin(grace=NEVER if where == "ask" else 0.05)
    dist.barrier()
    if rank == 0:
        if where == "gather":
            once(GatherLane, "finish_lap", lambda: hear("interrupted"))
        hear("interrupted")
    else:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        if where == "join":
            with pytest.raises(KeyboardInterrupt):
                handle.join()
        else:
            run_to(KeyboardInterrupt, model)
        say("interrupted")
    run(model, reference, 1)
    end(handle)


def ends_with_its_goodbye(rank: int, size: int) -> None:
    """Rank 1 is killed as soon as its BYE is sent; rank 0, whose service watches its lap, joins after that."""
    model, reference, handle = begin(grace=NEVER)

    def await_end() -> None:
        assert select.select([os.pidfd_open(int(hear("pid")))], [], [], BOUND)[0]
        time.sleep(0.3)  # the service thread looks after its peers meanwhile

    if rank == 0:
        in_block(model, 4, await_end)
    run(model, reference, 0)
    if rank == 1:
        say("pid", os.getpid())
        once(ControlMesh, "_send", lambda: os.kill(os.getpid(), signal.SIGKILL), after=True)
    handle.join()
    assert handle.report().transfer == "all_gather"


def a_round_ahead(rank: int, size: int) -> None:
    """When rank 0 reads what rank 1 said in a round, what it says in the next one is there too."""
    model, reference, handle = begin(grace=NEVER)
    if rank == 0:
        once(ControlMesh, "_receive_all", lambda: hear("ahead"))
    handle.join()
    if rank == 1:
        once(ControlMesh, "_send", lambda: say("ahead"), after=True)
    run(model, reference, 0)
    end(handle)


def killed_without_pidfd(rank: int, size: int) -> None:
    """As where processes cannot see each other: a closed socket tells."""

    def refuse(*_: object) -> int:
        raise OSError("no such process here")

    heard, os.pidfd_open = Heard(), refuse
    model, reference, handle = begin(grace=NEVER)
    run(model, reference, 0)
    if rank == 1:
        in_block(model, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    run(model, reference, 1)
    assert handle.report().transfer == "local"
    assert "rank 1 (it was at a forward of 'model') has ended" in heard.saying("goes on by itself")[0]


def fails_alone(rank: int, size: int, where: str) -> None:
    """Rank 0 gives up, and stays. The others wait for its gather, or are in a block that is about to raise."""
    model, reference, handle = begin(host="pinned")
    dist.barrier()

    def divide() -> None:
        say(f"inside {rank}")
        hear("failed")
        time.sleep(0.5)
        raise ZeroDivisionError

    def fail_later() -> None:
        hear("inside 1", "inside 2")
        fail()

    if rank == 0:
        once(GatherLane, "finish_lap", *((fail_later, True) if where == "block" else (fail,)))
        hear("told 1", "told 2")
        return
    if where == "block":
        in_block(model, 4, divide)
        run_to(ZeroDivisionError, model)
    start = time.monotonic()
    for _ in range(2):
        run_to(RuntimeError, model, "rank 0 failed.*no such luck.*as another rank says")
    assert time.monotonic() - start < BOUND / 2
    say(f"told {rank}")


def destroys_its_groups(rank: int, size: int) -> None:
    model, reference, handle = begin()
    for step in range(4 - 3 * rank):
        run(model, reference, step)
    assert handle.report().transfer == "all_gather"
    dist.destroy_process_group()
    assert left_behind() == []


def returns_from_a_child(rank: int, size: int) -> None:
    """Children of multiprocessing run no exit handlers of the interpreter's."""
    model, reference, handle = begin()
    dist.is_initialized = lambda: False  # so that nothing but the end of the process is an end
    for step in range(3 - 3 * rank):
        run(model, reference, step)
        time.sleep(0.2)
    assert handle.report().transfer == "all_gather"


SCRIPT = """
import atexit, gc, os, signal, sys, threading, time
gc.disable()  # while everything is imported
import torch, torch.distributed as dist
from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.distributed.control import ControlMesh
from tests.toys import Stack, feed, toy
gc.enable()

def work(how):
    rank = int(os.environ["RANK"])
    # What was registered first runs last.
    atexit.register(lambda: print("left", [t.name for t in threading.enumerate() if "dlo" in t.name], flush=True))
    wait = ControlMesh.wait
    ControlMesh.wait = lambda *args: (wait(*args), time.sleep(0.2))[0]  # the thread takes its time to end
    store = dist.FileStore(os.environ["STORE"], 2) if "STORE" in os.environ else None
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, reference = toy(Stack, 5), toy(Stack, 5)
    handle = apply_distributed_layerwise_offload(model, grace=0.1, timeout=30.0)
    with torch.no_grad():
        for step in range(1 if rank == 1 or how == "in a barrier" else 4):
            assert torch.equal(model(feed(step)), reference(feed(step)))
        if rank == 1:
            raise ZeroDivisionError if how == "raises" else SystemExit(7)
        if how == "in a barrier":
            try:
                dist.barrier()
            except RuntimeError:
                print("broken")
        if how == "exits":
            child = os.fork()
            if child == 0:
                signal.alarm(5)
                try:
                    model(feed(0))
                except RuntimeError as error:
                    atexit._run_exitfuncs()
                    os._exit(3 if "forked child" in str(error) else 4)
            print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print("transfer", handle.report().transfer, flush=True)

if "RANK" in os.environ:
    work(sys.argv[1])
    sys.exit()
torch.set_num_threads(1)
gc.freeze()  # no rank looks for garbage in what it has from here
pids = {how: [] for how in sys.argv[2:]}
for how in pids:
    for rank in range(2):
        pids[how].append(os.fork())
        if pids[how][-1] == 0:
            output = os.open(f"{sys.argv[1]}/{how} {rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1), os.dup2(output, 2)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
            os.environ.update(STORE=f"{sys.argv[1]}/{how}", GLOO_SOCKET_IFNAME="lo")
            work(how)
            sys.exit()
for how in pids:
    print(how, [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids[how]], flush=True)
"""


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "STORE")}
    environ.update(PYTHONPATH=os.getcwd(), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    return subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=55)


def test_6_ends_of_processes(tmp_path: Path) -> None:
    """Pairs of ranks, forked from a process that has imported everything, which end as any script does."""
    codes = {"raises": 1, "exits": 7, "in a barrier": 7}
    result = launch(tmp_path, str(tmp_path / "script.py"), str(tmp_path), *codes)
    texts = {how: [(tmp_path / f"{how} {rank}").read_text() for rank in range(2)] for how in codes}
    assert result.stdout.splitlines() == [f"{how} [0, {code}]" for how, code in codes.items()], (result, texts)
    assert "broken" in texts["in a barrier"][0], texts  # by the end of a rank that nobody else will call
    assert "child 3" in texts["exits"][0] and "forked child" not in texts["exits"][0], texts  # it ends in silence
    for how, pair in texts.items():
        assert all("left []" in text for text in pair), texts
        assert how == "in a barrier" or "transfer all_gather" in pair[0], texts
        assert "leaves without the other ranks" not in pair[1], texts


def test_6_a_rank_that_exits_under_torchrun_lets_the_other_finish(tmp_path: Path) -> None:
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    result = launch(tmp_path, *module, str(tmp_path / "script.py"), "exits")
    assert result.returncode == 1 and "transfer all_gather" in result.stdout, result
    assert "exitcode  : 7" in result.stderr, result.stderr


def switch_intervals(rank: int, size: int, interval: float) -> None:
    sys.setswitchinterval(interval)
    seen: list[tuple[bool, float]] = []
    finish_lap = GatherLane.finish_lap

    def noting(lane: GatherLane, is_ghost: bool) -> None:
        seen.append((is_ghost, sys.getswitchinterval()))
        finish_lap(lane, is_ghost)

    def is_now() -> bool:
        return sys.getswitchinterval() == pytest.approx(interval, abs=5e-6)

    GatherLane.finish_lap = noting
    model, reference, handle = begin(grace=NEVER)
    for step in range(2 - rank):
        run(model, reference, step)
    handle.join()
    assert is_now() and [ghost for ghost, _ in seen] == [False, rank == 1]
    assert seen[0][1] == pytest.approx(interval, abs=5e-6)
    assert seen[1][1] == pytest.approx(min(interval, 5e-4) if rank == 1 else interval, abs=5e-6)
    if rank == 1:
        once(GatherLane, "finish_lap", fail)
        handle.join()
    run(model, reference, 2)  # alone
    assert handle.report().transfer == "local" and is_now()


def calls_from_a_second_thread(rank: int, size: int) -> None:
    """It is refused while the first one computes; what that computes, and what follows, is right."""
    model, reference, handle = begin(grace=NEVER)
    errors: list[str] = []

    def call() -> None:
        try:
            run(model, reference, 1)
        except RuntimeError as error:
            errors.append(str(error))

    def call_beside() -> None:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(BOUND / 3)

    in_block(model, 2, call_beside)
    run(model, reference, 0)
    assert len(errors) == 1 and "called from a second thread" in errors[0], errors
    run(model, reference, 2)
    end(handle)


def slow_to_disable(rank: int, size: int) -> None:
    first, second = begin(3), begin(4)
    if rank == 1:
        once(Attachment, "detach", lambda: time.sleep(0.5))
    first[2].remove()
    run(*second[:2], 0)
    run(*first[:2], 0)
    end(second[2])


CASES: list[tuple[str, int, Callable[..., None], tuple[Any, ...]]] = [
    ("1 an ask comes with its wake-up", 2, wakes_up_first, ()),
    ("1 an ask that lost a round begins the next one", 2, loses_a_round, ()),
    ("1 an ask during a round begins the next one", 2, speaks_in_a_round, ("ask",)),
    ("1 a BYE during a round begins the next one", 2, speaks_in_a_round, ("bye",)),
    ("2 a call that has ended leaves its lap at once", 2, interrupted_between_blocks, ()),
    ("2 a long block keeps its lap", 2, longer_than_a_grace, ("block",)),
    ("2 a long wait in the engine keeps its lap", 2, longer_than_a_grace, ("gather",)),
    ("3 an interrupt in a fetch comes after it", 2, interrupted_in_a_fetch, ()),
    ("3 an interrupt ends the wait for a pass", 2, interrupted_at_a_wait, ("ask",)),
    ("3 an interrupt ends the wait for a gather", 2, interrupted_at_a_wait, ("gather",)),
    ("3 an interrupt ends the wait in join", 2, interrupted_at_a_wait, ("join",)),
    ("4 who said BYE and ended is not lost", 2, ends_with_its_goodbye, ()),
    ("4 a rank may be a round ahead", 2, a_round_ahead, ()),
    ("4 without pidfd a closed socket tells", 2, killed_without_pidfd, ()),
    ("5 who gives up tells those that wait", 3, fails_alone, ("gather",)),
    ("5 a loss behind an exception comes at the next call", 3, fails_alone, ("block",)),
    ("6 groups are destroyed after a join", 2, destroys_its_groups, ()),
    ("6 a child of multiprocessing joins", 2, returns_from_a_child, ()),
    ("7 a long switch interval is lowered, and restored", 2, switch_intervals, (0.01,)),
    ("7 a short switch interval stays", 2, switch_intervals, (0.0002,)),
    ("8 a second thread is refused", 2, calls_from_a_second_thread, ()),
    ("8 no pass begins before all have disabled", 2, slow_to_disable, ()),
]


@pytest.fixture(scope="module")
def server_of_ranks() -> None:
    """Starting it, which the first ranks wait for, is not within any bound."""
    run_ranks(1, max)


@pytest.mark.parametrize("size,work,args", [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_rule(server_of_ranks: None, size: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    dying = (1,) if work in (ends_with_its_goodbye, killed_without_pidfd) else ()
    run_ranks(size, work, *args, timeout=BOUND, expect_death=dying)
