# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Waves over real worker processes: what travels, what fails and how it is told, and that nothing is left behind."""

from __future__ import annotations

import ast
import gc
import importlib.util
import os
import pathlib
import re
import select
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import zmq
from PIL import Image

from diffusers_dlo.concurrency.executor import WaveError, WaveExecutor, WaveTimeoutError
from diffusers_dlo.concurrency.messages import encode
from diffusers_dlo.concurrency.processes import socket_folder
from diffusers_dlo.concurrency.worker import endpoint
from tests import toys

from .workers import Service, fail_to_start, folder_of, held, listening_addresses, reply, runs, wait_for


pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def held_before() -> tuple[int, int]:
    gc.collect()
    return held()


@pytest.fixture(scope="module")
def executor(held_before: tuple[int, int]) -> Iterator[WaveExecutor]:
    with WaveExecutor(Service, 2, {"greeting": "hello"}, timeout=20.0, env={"OMP_NUM_THREADS": "1"}) as executor:
        yield executor


def next_wave_id(executor: WaveExecutor) -> int:
    """The id of the wave after a failed one, whose message says its own."""
    with pytest.raises(WaveError) as raised:
        executor.call(0, "fail", "on purpose")
    found = re.match(r"wave (\d+) ", str(raised.value))
    assert found
    return int(found[1]) + 1


def test_results_come_in_order_and_fewer_payloads_leave_ranks_idle(executor: WaveExecutor) -> None:
    greetings = ["hello Ada, from 0 of 2", "hello Bob, from 1 of 2"]
    assert executor.wave("greet", ["Ada", "Bob"]) == greetings
    assert executor.wave("greet", ["Ada"]) == greetings[:1]
    assert executor.call(1, "greet", "Bob") == greetings[1]
    # The first to answer is not the first in the results.
    assert executor.wave("sleep", [0.3, 0.0]) == [0.3, 0.0]


def test_tensors_arrays_and_images_travel(executor: WaveExecutor) -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    array = np.linspace(0, 1, 5, dtype=np.float32)
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    sent = {"tensor": tensor, "rest": (array, [image, None])}
    for got in executor.wave("echo", [sent, sent]):
        assert got["tensor"].dtype == torch.bfloat16 and torch.equal(got["tensor"], tensor)
        assert isinstance(got["rest"], tuple) and got["rest"][0].dtype == np.float32
        assert np.array_equal(got["rest"][0], array)
        assert got["rest"][1][0].mode == "RGB" and got["rest"][1][0].tobytes() == image.tobytes()


def test_the_ranks_are_one_world(executor: WaveExecutor) -> None:
    assert executor.wave("gather", [1.0, 2.0]) == [[1.0, 2.0], [1.0, 2.0]]


def test_ranks_that_share_weights_take_unequal_work_and_calls_alone(executor: WaveExecutor) -> None:
    reference = toys.toy(toys.Stack, 5)
    with torch.no_grad():
        expected = [reference(toys.feed(seed)) for seed in range(6)]
    first, second = executor.wave("stream", [[0, 1, 2, 3], [4]])
    alone = executor.call(1, "stream", [5, 0])  # rank 0 waits for a request, and serves its shards
    for got, wanted in ((first, expected[:4]), (second, expected[4:5]), (alone, [expected[5], expected[0]])):
        assert len(got) == len(wanted) and all(torch.equal(a, b) for a, b in zip(got, wanted))


def test_workers_have_their_environment(executor: WaveExecutor) -> None:
    assert executor.wave("variable", ["RANK", "LOCAL_RANK"]) == ["0", "1"]
    assert executor.wave("variable", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"]) == ["2", "2"]
    assert executor.wave("variable", ["GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"]) == ["lo", "1"]


def test_what_cannot_be_sent_is_refused_before_anything_is(
    executor: WaveExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    wave_id = next_wave_id(executor)
    with pytest.raises(ValueError, match="up to 2 workers; it got 3"):
        executor.wave("echo", [1, 2, 3])
    with pytest.raises(ValueError, match="it got 0"):
        executor.wave("echo", [])
    with pytest.raises(ValueError, match="the payload of rank 1 cannot be sent"):
        executor.wave("echo", [1, object()])
    with pytest.raises(ValueError, match="no rank 2"):
        executor.call(2, "echo", 1)
    with pytest.raises(ValueError, match="'deadline' is 0"):
        executor.call(0, "echo", 1, deadline=0)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="rank 1 takes .* a message 1000 at most"):
        patch.setattr("diffusers_dlo.concurrency.envelope.MAX_MESSAGE", 1000)
        executor.wave("echo", [1, bytes(1000)])
    assert next_wave_id(executor) == wave_id + 1


def test_a_failure_keeps_the_results_of_others(executor: WaveExecutor) -> None:
    with pytest.raises(WaveError) as raised:
        executor.wave("fail", [None, "no such\nprompt"])
    error = raised.value
    assert not isinstance(error, TimeoutError)
    assert error.results == {0: "well"} and list(error.errors) == [1]
    assert (error.errors[1].type, error.errors[1].message) == ("ValueError", "no such\nprompt")
    assert "in fail" in error.errors[1].traceback
    assert "1 of 2 ranks failed.\n  rank 1: ValueError: no such\n    prompt\n" in str(error)
    with pytest.raises(WaveError, match=r"rank 0: ValueError: a\n  rank 1: ValueError: b"):
        executor.wave("fail", ["a", "b"])


@pytest.mark.parametrize(
    "method, said",
    [
        ("missing", "AttributeError: 'Service' has no public method 'missing'"),
        ("_greeting", "no public method"),
        ("__init__", "no public method"),
        ("text", "no public method"),
        ("unencodable", "ValueError: .*'builtins.object' has no representation"),
    ],
)
def test_a_call_that_has_no_result_is_an_error_of_its_rank(executor: WaveExecutor, method: str, said: str) -> None:
    with pytest.raises(WaveError, match=f"rank 1: .*{said}"):
        executor.call(1, method, None)
    assert executor.wave("echo", [1, 2]) == [1, 2]


def test_a_rank_that_is_late_is_named_and_its_reply_discarded(executor: WaveExecutor) -> None:
    with pytest.raises(WaveTimeoutError, match=r"rank 1 did not answer within 0\.3 s") as raised:
        executor.wave("sleep", [0.0, 1.0], deadline=0.3)
    assert isinstance(raised.value, TimeoutError)
    assert raised.value.results == {0: 0.0} and list(raised.value.errors) == [1]
    assert executor.wave("echo", ["a", "b"]) == ["a", "b"]


def test_stale_and_duplicate_replies_are_discarded(executor: WaveExecutor) -> None:
    wave_id = next_wave_id(executor)
    old = [reply(wave_id - 1, "of the wave that failed"), reply(0, "of the start")]
    # Rank 0 answers twice, while rank 1 is waited for: the first reply counts, and the second is a duplicate.
    payloads = [([*old, reply(wave_id, "first")], 0.0), (old, 0.3)]
    assert executor.wave("inject", payloads) == ["first", "injected"]
    assert executor.wave("echo", [1, 2]) == [1, 2]


def test_too_many_stale_replies_end_a_wave_and_not_the_next(executor: WaveExecutor) -> None:
    old = reply(1, "old")
    assert executor.wave("inject", [([old] * 6, 0.0), ([old] * 10, 0.3)]) == ["injected", "injected"]
    with pytest.raises(TimeoutError, match="more than 16 .*: 17 from rank 1") as raised:
        executor.wave("inject", [([], 0.0), ([old] * 17, 0.3)])
    assert not isinstance(raised.value, WaveError)
    assert executor.wave("echo", [1, 2]) == [1, 2]


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda wave_id: b"", "could not be read"),
        (lambda wave_id: b"\x80\x04K\x01.", "could not be read"),
        (lambda wave_id: encode([wave_id]), "has no 'wave_id'"),
        (lambda wave_id: reply(True, 1), "has no 'wave_id'"),
        (lambda wave_id: reply(wave_id + 1, 1), r"answers wave \d+, which has not been sent"),
        (lambda wave_id: encode({"wave_id": wave_id, "ok": True}), "neither a value nor an error"),
        (lambda wave_id: encode({"wave_id": wave_id, "ok": 1, "value": 1}), "neither a value nor an error"),
        (lambda wave_id: encode({"wave_id": wave_id, "ok": False, "type": 1}), "neither a value nor an error"),
    ],
)
def test_a_malformed_reply_fails_its_rank(executor: WaveExecutor, make: Callable[[int], bytes], said: str) -> None:
    malformed = make(next_wave_id(executor))
    with pytest.raises(WaveError, match=f"rank 0: MalformedReply: .*{said}") as raised:
        executor.wave("inject", [([malformed], 0.0), ([], 0.0)])
    assert raised.value.results == {1: "injected"}
    assert executor.wave("echo", [1, 2]) == [1, 2]


def test_a_stranger_is_not_heard(executor: WaveExecutor) -> None:
    context = zmq.Context()
    try:
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.IDENTITY, b"stranger")
        stranger.connect(f"ipc://{folder_of(executor)}/socket")
        stranger.send(reply(next_wave_id(executor), "mine"))
        stranger.send_multipart([b"two", b"frames"])
        assert executor.wave("sleep", [0.3, 0.3]) == [0.3, 0.3]
        for _ in range(17):
            stranger.send(b"noise")
        with pytest.raises(TimeoutError, match="17 from a stranger"):
            executor.wave("sleep", [0.3, 0.3])
    finally:
        context.destroy(linger=0)
    assert executor.wave("echo", [1, 2]) == [1, 2]


def test_an_interrupt_ends_the_wait_and_not_the_workers(executor: WaveExecutor) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "starting workers changed a handler"
    for pid in executor.pids:
        os.kill(pid, signal.SIGINT)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        executor.wave("sleep", [1.0, 1.0])
    timer.join()
    assert executor.wave("echo", [1, 2]) == [1, 2]


def test_one_wave_at_a_time(executor: WaveExecutor) -> None:
    thread = threading.Thread(target=executor.wave, args=("sleep", [0.6, 0.6]))
    thread.start()
    time.sleep(0.2)
    with pytest.raises(RuntimeError, match="Another wave is running"):
        executor.wave("echo", [1])
    thread.join()
    assert executor.wave("echo", [1]) == [1]


def test_a_forked_child_is_refused(executor: WaveExecutor) -> None:
    child = os.fork()
    if not child:
        refused = 0
        for use in (lambda: executor.wave("echo", [1]), lambda: executor.alive, executor.shutdown):
            try:
                use()
            except RuntimeError as error:
                refused += "forked child" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert executor.wave("echo", [1, 2]) == [1, 2]


def test_messages_cross_no_network(executor: WaveExecutor) -> None:
    folder = folder_of(executor)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_ISSOCK((folder / "socket").stat().st_mode)
    assert listening_addresses(os.getpid()) == []
    # What gloo opens for its collectives is on the loopback interface, and nothing else listens.
    assert [set(listening_addresses(pid)) for pid in executor.pids] == [{"0100007F"}, {"0100007F"}]


def test_nothing_that_arrives_can_be_executed() -> None:
    for name in ("executor", "worker", "messages"):
        spec = importlib.util.find_spec(f"diffusers_dlo.concurrency.{name}")
        assert spec and spec.origin
        nodes = list(ast.walk(ast.parse(pathlib.Path(spec.origin).read_text())))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not {one.split(".")[0] for one in imported} & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def nested() -> Callable[[], None]:
    def inside() -> None: ...

    return inside


@pytest.mark.parametrize(
    "target, num_workers, args, said",
    [
        (lambda: None, 1, {}, "cannot be imported"),
        (nested(), 1, {}, "cannot be imported"),
        (Service("hello").echo, 1, {}, "cannot be imported"),
        ("tests.concurrency.workers", 1, {}, "of the form"),
        ("tests.concurrency.workers:not a name", 1, {}, "of the form"),
        (Service, 0, {}, "'num_workers' is 0"),
        (Service, 1, {"greeting": object()}, "'args' cannot be sent"),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_is(
    target: Any, num_workers: int, args: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    with pytest.raises(ValueError, match=said):
        WaveExecutor(target, num_workers, args)


def test_a_launch_that_fails_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads = threading.active_count()
    with pytest.raises(FileNotFoundError):
        WaveExecutor(Service, 1, {"greeting": "hello"})
    assert list(tmp_path.iterdir()) == [] and threading.active_count() == threads


def test_workers_that_cannot_start_are_told_as_one_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(WaveError, match="workers could not start: 2 of 2 ranks failed") as raised:
        WaveExecutor(fail_to_start, 2)
    assert "rank 0 ended with exit code 3" in str(raised.value)
    assert "rank 1: OSError: no such checkpoint" in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path).encode() not in b"".join(
        path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if path.exists()
    )


def test_a_rank_that_dies_is_named_and_closes_the_executor() -> None:
    executor = WaveExecutor(Service, 2, {"greeting": "hello"}, timeout=20.0)
    pids, folder = executor.pids, folder_of(executor)
    with pytest.raises(WaveError, match="rank 1 was killed by SIGKILL") as raised:
        executor.wave("kill", [None, "SIGKILL"])
    assert raised.value.results == {0: "alive"} and raised.value.errors[1].type == "WorkerDied"
    assert executor.alive == [0] and executor.closed
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 was killed by SIGKILL, .*make a new one"):
        executor.wave("echo", [1])
    assert time.monotonic() - start < 1
    # Forgotten instead of shut down.
    del executor, raised
    gc.collect()
    assert not any(map(runs, pids)) and not folder.exists()


def be_a_parent(answer: int) -> None:
    """Tells the workers' processes and directory, and waits for one until it is killed."""
    executor = WaveExecutor(Service, 2, {"greeting": "hello"}, timeout=600.0)
    child = os.fork()
    if not child:
        del executor  # the child's copy; the workers are not its own
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder_of(executor).exists() and executor.wave("echo", [1, 2]) == [1, 2]
    os.write(answer, f"{executor.pids[0]} {executor.pids[1]} {folder_of(executor)}".encode())
    executor.call(0, "sleep", 600.0)


def test_workers_end_with_their_parent() -> None:
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            be_a_parent(write)
        finally:
            os._exit(1)
    os.close(write)
    with open(read) as answer:
        wait_for(lambda: bool(select.select([read], [], [], 0)[0]), 40)
        time.sleep(0.3)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        *pids, folder = answer.read().split()
    # Rank 0 is busy and rank 1 idle.
    assert wait_for(lambda: not any(runs(int(pid)) for pid in pids), 15)
    assert len(pids) == 2 and not os.path.exists(folder)


def test_stuck_and_stopped_workers_are_shut_down_and_nothing_is_left(
    executor: WaveExecutor, held_before: tuple[int, int]
) -> None:
    """The last test of the file: it ends the executor that the others share."""
    pids, folder = executor.pids, folder_of(executor)
    raised: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(RuntimeError, match="was shut down while") as caught:
            executor.call(0, "sleep", 600.0, deadline=600.0)
        raised.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    os.kill(pids[1], signal.SIGSTOP)
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < 10
    thread.join(timeout=1)
    assert len(raised) == 1, "a thread still waits for its wave"
    executor.shutdown()
    with pytest.raises(RuntimeError, match="has been shut down"):
        executor.wave("echo", [1])
    assert executor.closed and executor.alive == []
    assert not any(map(runs, pids)) and not folder.exists()
    gc.collect()
    assert wait_for(lambda: held() == held_before, 2), f"{held_before} files and threads became {held()}"


def test_the_socket_has_a_short_path_wherever_temporary_files_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for length, parent in ((76, None), (77, "/tmp"), (400, "/tmp")):
        folder = "/var".ljust(length, "x")
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with patch.object(
            tempfile, "mkdtemp", side_effect=lambda prefix, dir: f"{dir or tempfile.tempdir}/{prefix}12345678"
        ):
            path = endpoint(socket_folder()).removeprefix("ipc://")
        assert path.startswith(parent or folder) and len(path) < 108
