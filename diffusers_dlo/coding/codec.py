# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns what a codec is, and which versions of one read the same. Must not know of blocks, shards or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


ON_HOST = "zstd"
"""The codec that needs no device: the reference, and what every machine can decode."""


class Codec(ABC):
    """
    Makes runs of 16-bit floats smaller, and exactly the same again. What is coded is a run of bytes of even length
    that begins at a multiple of 256; coded, it is a run too, of a multiple of 256 bytes, and holds all that decoding
    needs beside its decoded length.

    Attributes:
        name (`str`): as checkpoints name it.
        version (`str`): the version of its library; what one of another first number has coded is refused.
        device (`torch.device`): where all that it is given lies.
    """

    name: str
    version: str
    device: torch.device

    @abstractmethod
    def encode(self, data: torch.Tensor) -> torch.Tensor:
        """`data`, `(nbytes,)` of `uint8`, coded: `(coded_nbytes,)` of `uint8`, which may be the larger."""

    @abstractmethod
    def check(self, coded: torch.Tensor, nbytes: int) -> None:
        """
        Makes sure that a coded run, on the host, is made up as it has to be for `nbytes` bytes: that decoding it
        reads and writes nothing outside. Whether its content is what was written is for digests to tell.

        Raises:
            `ValueError`: it is not, with the reason.
        """

    @abstractmethod
    def scratch_nbytes(self, nbytes: int) -> int:
        """Bytes of `device` memory that decoding a run of up to `nbytes` bytes takes beside input and output."""

    @abstractmethod
    def decode(self, coded: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        """
        Queues the decoding of a run, checked and intact, into `out`, of its decoded length, on the current stream.
        The host does not wait, and nothing is allocated on the device.

        Raises:
            `RuntimeError`: it cannot be decoded.
        """


def check_version(codec: Codec, found: str, path: str) -> None:
    """
    Refuses what a codec of another series has coded.

    Raises:
        `RuntimeError`: naming both versions.
    """
    if found.split(".")[0] != codec.version.split(".")[0]:
        raise RuntimeError(
            f"'{path}' was coded by '{codec.name}' of version {found}, and here is version {codec.version}, which may "
            "read it as something else. Install the version it was coded with, or decode it with that "
            "(`diffusers-dlo pack --decode`) and pack it anew."
        )
