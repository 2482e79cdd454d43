# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Reading ahead: what the page cache holds before and after, which reads were made, and that nothing stays behind."""

import builtins
import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import pty
import re
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diffusers.utils import logging as diffusers_logging

from diffusers_dlo.checkpoint.mapped import FileRange, map_read_only
from diffusers_dlo.checkpoint.read_ahead import network_file_system, read_ahead


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the page cache is observed by Linux's means")

MIB = 1 << 20
CHUNK = 8 * MIB
NAME = "diffusers_dlo.checkpoint.read_ahead"

Read = tuple[str, int, int]
"""File name, offset and number of bytes asked for."""


def cached_pages(path: Path, start: int, stop: int) -> int:
    """How many pages from byte `start` to `stop` of a file are in the page cache, whoever brought them there."""
    with open(path, "rb") as file:
        content = map_read_only(file.fileno())
    pages = (ctypes.c_ubyte * -(-content.numel() // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(content.data_ptr()), ctypes.c_size_t(content.numel()), pages) == 0
    return sum(page & 1 for page in pages[start // mmap.PAGESIZE : -(-stop // mmap.PAGESIZE)])


def evict(path: Path, start: int = 0, nbytes: int = 0) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), start, nbytes, os.POSIX_FADV_DONTNEED)


def warm(path: Path, start: int, nbytes: int) -> None:
    """Brings these bytes into the page cache and none beside them."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for offset in range(start, start + nbytes, mmap.PAGESIZE):
            os.pread(file.fileno(), 1, offset)


def cold_file(path: Path, nbytes: int) -> Path:
    """A file that is on the disk and not in the page cache."""
    with open(path, "wb") as file:
        block = os.urandom(MIB)
        for start in range(0, nbytes, MIB):
            file.write(block[: nbytes - start])
        file.flush()
        os.fsync(file.fileno())
    with open(path, "rb", buffering=0) as file:
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError as error:
            # Of its own files a user can ask the kernel in another way.
            if error.errno == errno.EOPNOTSUPP and os.fstat(file.fileno()).st_uid != os.geteuid():
                pytest.skip("the file system of tmp_path does not say what is cached (no RWF_NOWAIT)")
    evict(path)
    if cached_pages(path, 0, nbytes):
        pytest.skip("the file system of tmp_path keeps its files in memory")
    return path


def sparse_file(path: Path, nbytes: int) -> Path:
    """Instantly there; for tests that have everything count as cold."""
    with open(path, "wb") as file:
        file.truncate(nbytes)
    return path


def up_to_three_times(test: Callable[..., None]) -> Callable[..., None]:
    """
    Repeats a test of the page cache, which is everyone's: the system takes pages out of it when it likes, and a fast
    disk may have answered before the look that found a page missing returns.
    """

    @functools.wraps(test)
    def repeating(*args: Any, **kwargs: Any) -> None:
        for _ in range(2):
            with contextlib.suppress(AssertionError):
                return test(*args, **kwargs)
        test(*args, **kwargs)

    return repeating


@pytest.fixture
def all_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system has no way to say what is cached, so that a test does not depend on the cache."""
    monkeypatch.delattr(os, "RWF_NOWAIT")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """The reads that waited for the disk, in the order they were made."""
    made: list[Read] = []
    on_reads(monkeypatch, lambda read, *_: made.append(read))
    return made


def on_reads(monkeypatch: pytest.MonkeyPatch, action: Callable[[Read, memoryview], int | None]) -> None:
    """Has `action` run before each read; if it returns a number, no more than so many bytes are read."""
    preadv = os.preadv

    def acting(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            return preadv(fd, buffers, offset, flags)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        limit = action((name, offset, len(buffers[0])), buffers[0])
        return preadv(fd, [buffers[0][:limit]], offset)

    monkeypatch.setattr(os, "preadv", acting)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each progress bar."""
    made: list[dict[str, Any]] = []
    tqdm = diffusers_logging.tqdm

    def recording(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs)
        return tqdm(*args, **kwargs)

    monkeypatch.setattr(diffusers_logging, "tqdm", recording)
    return made


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No test may leave a file open or a thread running, whether it read, failed or was interrupted."""

    def open_files() -> set[tuple[str, str]]:
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
            except FileNotFoundError:
                pass  # the one that listed them
        return found

    before = open_files()
    yield
    assert not open_files() - before
    assert not [thread for thread in threading.enumerate() if "read_ahead" in thread.name]


@pytest.fixture
def of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are somebody else's, of which the kernel does not say what is cached."""
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)


@pytest.fixture(params=["own", "of another user"])
def owner(request: pytest.FixtureRequest) -> None:
    if request.param != "own":
        request.getfixturevalue("of_another_user")


@pytest.mark.usefixtures("owner")
class TestPageCache:
    @up_to_three_times
    def test_brings_in_what_is_asked_for_and_leaves_the_rest(self, tmp_path: Path) -> None:
        path = cold_file(tmp_path / "weights", 96 * MIB)
        first, second = (5 * MIB + 300, 9 * MIB + 5), (80 * MIB, 81 * MIB)
        nbytes = read_ahead([FileRange(str(path), start, stop - start) for start, stop in (second, first)])
        assert nbytes == (first[1] - first[0]) + MIB
        assert cached_pages(path, *first) == 4 * MIB // mmap.PAGESIZE + 1
        assert cached_pages(path, *second) == MIB // mmap.PAGESIZE
        # The kernel goes on for some MiB after what is read, never before it, and a probe is one page.
        assert cached_pages(path, 0, 5 * MIB) == 0
        assert cached_pages(path, 48 * MIB, 80 * MIB) == 0

    @up_to_three_times
    def test_reads_nothing_the_second_time(self, tmp_path: Path, reads: list[Read], bars: list[dict]) -> None:
        path = cold_file(tmp_path / "weights", 20 * MIB + 777)
        reads.clear()
        bars.clear()
        whole = [FileRange(str(path), 0, 20 * MIB + 777)]
        assert read_ahead(whole) == 20 * MIB + 777
        assert cached_pages(path, 0, 20 * MIB + 777) == 20 * MIB // mmap.PAGESIZE + 1
        assert len(reads) == 3 and len(bars) == 1
        assert read_ahead(whole, show=True) == 0
        assert len(reads) == 3 and len(bars) == 1

    @up_to_three_times
    def test_reads_only_the_chunks_that_are_not_all_there(self, tmp_path: Path, reads: list[Read]) -> None:
        path = cold_file(tmp_path / "weights", 4 * CHUNK)
        reads.clear()
        warm(path, CHUNK, CHUNK)
        assert cached_pages(path, 0, 4 * CHUNK) == CHUNK // mmap.PAGESIZE
        assert read_ahead([FileRange(str(path), 0, 4 * CHUNK)], threads=1) == 3 * CHUNK
        assert [offset for _, offset, _ in reads] == [0, 2 * CHUNK, 3 * CHUNK]

    @pytest.mark.parametrize("hole", [(0, 1), (4, 6), (15, 16)], ids=["first", "middle", "last"])
    @up_to_three_times
    def test_finds_a_hole(self, tmp_path: Path, reads: list[Read], hole: tuple[int, int]) -> None:
        path = cold_file(tmp_path / "weights", 2 * CHUNK)
        reads.clear()
        warm(path, 0, hole[0] * MIB)
        warm(path, hole[1] * MIB, (16 - hole[1]) * MIB)
        if hole[1] == 16:
            warm(path, 15 * MIB, MIB - mmap.PAGESIZE)  # the last page alone
        assert cached_pages(path, 0, 2 * CHUNK) < 2 * CHUNK // mmap.PAGESIZE
        assert read_ahead([FileRange(str(path), 0, 2 * CHUNK)]) == CHUNK
        assert reads == [("weights", hole[0] * MIB // CHUNK * CHUNK, CHUNK)]
        assert cached_pages(path, 0, 2 * CHUNK) == 2 * CHUNK // mmap.PAGESIZE

    @pytest.mark.parametrize("reason", ["no flag", "not supported", "end of file"])
    def test_reads_all_where_the_cache_is_not_known(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_another_user: None, reason: str
    ) -> None:
        path = sparse_file(tmp_path / "weights", 2 * CHUNK)
        warm(path, 0, 2 * CHUNK)
        preadv = os.preadv

        def refusing(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
            if flags and reason == "not supported":
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return 0 if flags else preadv(fd, buffers, offset)

        if reason == "no flag":
            monkeypatch.delattr(os, "RWF_NOWAIT")
        else:
            monkeypatch.setattr(os, "preadv", refusing)
        assert read_ahead([FileRange(str(path), 5, CHUNK)]) == CHUNK

    def test_reads_all_on_a_file_system_without_the_flag(self) -> None:
        try:
            fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
        except OSError:
            pytest.skip("there is no /dev/shm")
        with open(fd, "rb+") as file:
            file.truncate(3 * MIB)
            try:
                os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
            except OSError as error:
                assert error.errno == errno.EOPNOTSUPP
            else:
                pytest.skip("tmpfs knows the flag")
            assert read_ahead([FileRange(f"/proc/self/fd/{fd}", 0, 3 * MIB)]) == 3 * MIB


@pytest.mark.usefixtures("all_cold")
class TestReads:
    @pytest.mark.parametrize(
        "ranges, expected",
        [
            ([], []),
            ([(7, 0), (100 * MIB, 0)], []),
            ([(10, 20), (30, 5)], [(10, 25)]),
            ([(10, 20), (10, 20), (15, 3), (20, 30)], [(10, 40)]),
            ([(10, 90), (20, 5), (30, 10)], [(10, 90)]),
            ([(0, 10), (MIB + 9, 1)], [(0, MIB + 10)]),
            ([(0, 10), (MIB + 10, 1)], [(0, 10), (MIB + 10, 1)]),
            ([(50 * MIB, 9), (3, 4), (20 * MIB, 0), (10 * MIB, 2)], [(3, 4), (10 * MIB, 2), (50 * MIB, 9)]),
            ([(0, 2 * CHUNK)], [(0, CHUNK), (CHUNK, CHUNK)]),
            ([(CHUNK - 1, CHUNK + 2)], [(CHUNK - 1, 1), (CHUNK, CHUNK), (2 * CHUNK, 1)]),
            ([(64 * MIB - 3, 3), (64 * MIB - 900, 10)], [(64 * MIB - 900, 900)]),
        ],
    )
    def test_merges_and_cuts(
        self, tmp_path: Path, reads: list[Read], ranges: list[tuple[int, int]], expected: list[tuple[int, int]]
    ) -> None:
        path = sparse_file(tmp_path / "weights", 64 * MIB)
        nbytes = read_ahead([FileRange(str(path), *item) for item in ranges], threads=1)
        assert [(offset, count) for _, offset, count in reads] == expected
        assert nbytes == sum(count for _, count in expected)

    def test_reads_file_after_file_and_ascending(self, tmp_path: Path, reads: list[Read]) -> None:
        a, b = (str(sparse_file(tmp_path / name, 3 * CHUNK)) for name in "ab")
        ranges = [FileRange(b, 2 * CHUNK, 9), FileRange(a, 5, CHUNK), FileRange(b, 3, 6), FileRange(a, 2, 2)]
        assert read_ahead(ranges, threads=1) == 9 + CHUNK + 3 + 6
        assert reads == [("b", 3, 6), ("b", 2 * CHUNK, 9), ("a", 2, CHUNK - 2), ("a", CHUNK, 5)]

    def test_reads_in_parallel_into_few_buffers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = sparse_file(tmp_path / "weights", 12 * CHUNK)
        together, buffers = threading.Barrier(4), set()

        def meet(_: Read, buffer: memoryview) -> None:
            together.wait(timeout=10)  # breaks unless four are under way at a time
            buffers.add(id(buffer.obj))

        on_reads(monkeypatch, meet)
        assert read_ahead([FileRange(str(path), 0, 12 * CHUNK)], threads=4) == 12 * CHUNK
        assert len(buffers) == 4

    def test_goes_on_after_a_short_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, made = sparse_file(tmp_path / "weights", 3000), []

        def shorten(read: Read, _: memoryview) -> int:
            made.append(read[1:])
            return 1000

        on_reads(monkeypatch, shorten)
        assert read_ahead([FileRange(str(path), 100, 2500)]) == 2500
        assert made == [(100, 2500), (1100, 1500), (2100, 500)]

    def test_says_what_is_read_from_where(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        far, near = tmp_path / "far", tmp_path / "near"
        far.mkdir()
        near.mkdir()
        mounts = tmp_path / "mounts"
        mounts.write_text(f"27 1 254:0 / / rw - ext4 /dev/vda rw\n31 27 0:50 / {far} rw - nfs4 server:/models rw\n")
        plain = builtins.open
        monkeypatch.setattr(
            builtins, "open", lambda path, *a, **k: plain(mounts if "mountinfo" in str(path) else path, *a, **k)
        )
        paths = [sparse_file(far / "a", 24 * MIB), sparse_file(near / "b", 16 * MIB), sparse_file(far / "c", 9)]
        with caplog.at_level(logging.INFO, logger=NAME):
            read_ahead([FileRange(str(path), 0, path.stat().st_size) for path in paths])
            assert [record.getMessage() for record in caplog.records] == [
                f"Reading 25 MB from '{far}' (nfs4 at {far}).",
                f"Reading 17 MB from '{near}'.",
            ]
            read_ahead([FileRange(str(paths[0]), 0, 0)])
            assert len(caplog.records) == 2


@pytest.mark.usefixtures("all_cold")
class TestFailures:
    def test_a_range_beyond_the_end(self, tmp_path: Path, reads: list[Read]) -> None:
        whole, short = sparse_file(tmp_path / "whole", 100), sparse_file(tmp_path / "short", 100)
        with pytest.raises(RuntimeError, match=rf"'{short}' has 100 bytes and had 101 or more"):
            read_ahead([FileRange(str(whole), 0, 100), FileRange(str(short), 60, 41), FileRange(str(short), 0, 9)])
        assert reads == []

    def test_a_file_that_is_missing(self, tmp_path: Path, reads: list[Read]) -> None:
        whole, missing = sparse_file(tmp_path / "whole", 100), tmp_path / "missing"
        with pytest.raises(RuntimeError, match=rf"Cannot read '{missing}' \(No such file"):
            read_ahead([FileRange(str(whole), 0, 100), FileRange(str(missing), 0, 1)])
        assert reads == []
        assert read_ahead([FileRange(str(missing), 0, 0)]) == 0

    def test_a_file_cut_off_while_it_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = sparse_file(tmp_path / "weights", 6 * CHUNK)
        on_reads(monkeypatch, lambda read, _: os.truncate(path, CHUNK + 5) if read[1] == CHUNK else None)
        with pytest.raises(RuntimeError, match=rf"'{path}' has {CHUNK + 5} bytes and had {2 * CHUNK} or more"):
            read_ahead([FileRange(str(path), 0, 6 * CHUNK)], threads=1)

    def test_a_fault_of_the_disk_ends_all_reads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, made, failed = sparse_file(tmp_path / "weights", 40 * CHUNK), [], threading.Event()

        def fail(read: Read, _: memoryview) -> None:
            made.append(read)
            if read[1] == 2 * CHUNK:
                failed.set()
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if failed.is_set():
                time.sleep(0.05)

        on_reads(monkeypatch, fail)
        with pytest.raises(RuntimeError, match=rf"Cannot read '{path}' \(Input/output error\)") as caught:
            read_ahead([FileRange(str(path), 0, 40 * CHUNK)], threads=2)
        assert isinstance(caught.value.__cause__, OSError)
        assert len(made) < 40

    def test_an_interrupt_ends_all_reads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path, made = sparse_file(tmp_path / "weights", 40 * CHUNK), []

        def interrupt(read: Read, _: memoryview) -> None:
            made.append(read)
            if len(made) == 3:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            if len(made) >= 3:
                time.sleep(0.05)

        on_reads(monkeypatch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            read_ahead([FileRange(str(path), 0, 40 * CHUNK)], threads=2)
        assert 3 <= len(made) < 40


@contextlib.contextmanager
def terminal() -> Iterator[list[str]]:
    """Standard error is a terminal meanwhile; gives what was written to it. (pytest undoes this between phases.)"""
    written: list[str] = []
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with open(ours, "rb", buffering=0) as output:
        with open(theirs, "w") as stream, contextlib.redirect_stderr(stream):
            yield written
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal says that there is no more
            while piece := output.read(65536):
                shown += piece
        written.append(shown.decode())


@pytest.mark.usefixtures("all_cold")
class TestBar:
    @pytest.fixture
    def slowly_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FileRange]:
        """Takes long enough for a bar to be drawn again (tqdm: 0.1 s)."""
        on_reads(monkeypatch, lambda *_: time.sleep(0.06))
        return [FileRange(str(sparse_file(tmp_path / "weights", 5 * CHUNK)), 0, 5 * CHUNK)]

    def test_shows_bytes_and_speed_and_goes_away(self, slowly_read: list[FileRange]) -> None:
        with terminal() as written:
            assert read_ahead(slowly_read, show=True, threads=1) == 5 * CHUNK
        shown = written[0]
        assert re.search(r"Reading weights: +\d+%.* (8\.39|16\.8|25\.2|33\.6)M/41\.9M \[.*, +[\d.]+MB/s\]", shown), (
            shown
        )
        assert shown.endswith("\r") and shown.split("\r")[-2].strip() == ""

    def test_shows_nothing_unasked(self, slowly_read: list[FileRange]) -> None:
        with terminal() as written:
            assert read_ahead(slowly_read, threads=1) == 5 * CHUNK
        assert written == [""]

    def test_is_silenced_as_diffusers_is(self, slowly_read: list[FileRange]) -> None:
        diffusers_logging.disable_progress_bar()
        try:
            with terminal() as written:
                assert read_ahead(slowly_read, show=True, threads=1) == 5 * CHUNK
        finally:
            diffusers_logging.enable_progress_bar()
        assert written == [""]

    def test_is_off_where_there_is_no_terminal(
        self, slowly_read: list[FileRange], capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert read_ahead(slowly_read, show=True, threads=1) == 5 * CHUNK
        assert capfd.readouterr().err == ""


MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
90 27 0:60 / /mnt/models/far/near rw - ext4 /dev/vdb rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 27 0:50 / /mnt/models rw,relatime shared:5 master:1 - nfs4 server:/models rw,vers=4.2
32 31 0:51 / /mnt/models/far rw - lustre 10.0.0.1@tcp:/scratch rw
33 27 0:52 / /mnt/two\040words\011\134x rw - cifs //server/share rw
34 27 0:53 / /auto rw - autofs systemd-1 rw
35 34 0:54 / /auto rw - nfs server:/home rw
36 27 0:55 / /hidden rw - nfs server:/old rw
37 36 0:56 / /hidden rw - xfs /dev/vdc rw
40 27 0:61 / /s3 rw - fuse.s3fs s3fs rw
41 27 0:62 / /unknown rw - fuse.some-new-cloud bucket rw
42 27 0:63 / /layers rw - fuse.fuse-overlayfs fuse-overlayfs rw
43 27 0:64 / /usb rw - fuseblk /dev/sda1 rw
44 27 0:65 / /host rw - virtiofs host rw
45 27 0:66 / /plan9 rw - 9p host rw
"""


class TestNetworkFileSystem:
    @pytest.mark.parametrize(
        "path, expected",
        [
            ("/etc/passwd", None),
            ("/proc/self", None),
            ("/mnt/models", "nfs4 at /mnt/models"),
            ("/mnt/models/flux/a.safetensors", "nfs4 at /mnt/models"),
            ("/mnt/models/../models/flux", "nfs4 at /mnt/models"),
            ("/mnt/models2/flux", None),
            ("/mnt/models/far/flux", "lustre at /mnt/models/far"),
            ("/mnt/models/far/near/flux", None),
            ("/mnt/two words\t\\x/a", "cifs at /mnt/two words\t\\x"),
            ("/auto/me", "nfs at /auto"),
            ("/hidden/a", None),
            ("/s3/bucket/a", "fuse.s3fs at /s3"),
            ("/unknown/a", "fuse.some-new-cloud at /unknown"),
            ("/layers/a", None),
            ("/usb/a", None),
            ("/host/a", None),
            ("/plan9/a", "9p at /plan9"),
        ],
    )
    def test_is_found_by_the_deepest_mount(self, path: str, expected: str | None) -> None:
        assert network_file_system(path, MOUNTS) == expected

    def test_may_hold_everything(self) -> None:
        assert network_file_system("/etc", "27 1 0:9 / / rw - nfs4 server:/ rw") == "nfs4 at /"

    def test_is_that_of_the_file_behind_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("/mnt/models/flux")
        assert network_file_system(str(tmp_path / "link" / "a"), MOUNTS) == "nfs4 at /mnt/models"

    def test_reads_this_machines_mounts(self) -> None:
        assert network_file_system("/proc/self") is None

    def test_is_none_without_proc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: str, *_: object, **__: object) -> None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

        monkeypatch.setattr(builtins, "open", refuse)
        assert network_file_system("/mnt/models") is None
