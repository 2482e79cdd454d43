# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns the coded weights of a model while its offload is being enabled: whether they can stream as they lie there, and
their values where they cannot. Must not choose among kinds of host store for weights that are not coded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import torch
from diffusers.utils import logging

from ..block_discovery import Selection
from ..block_layout import BlockLayout
from ..checkpoint.mapped import FileStamp
from ..coding.block_reader import BlockReader
from ..coding.codec import Codec, check_version
from ..coding.coded_block import CodedBlock
from ..coding.coded_file import CodedFile, read_coded_file
from ..coding.loading import coded_file_of
from ..config import DistributedLayerwiseOffloadConfig
from ..device.interface import Platform
from ..offload_plan import ComponentPlan, OffloadPlan
from ..tensor_utils import OwnedTensor
from .mapped import MappedFile
from .store import tensor_view


logger = logging.get_logger(__name__)


def find_coded(selection: Selection, platform: Platform) -> CodedWeights | None:
    """
    The coded weights among the components that stream; None if there are none.

    Raises:
        `RuntimeError`: a file has changed since its model was loaded, or there is no codec for it here.
    """
    found = {name: coded_file_of(module) for name, module in selection.streamed.items()}
    files = {name: file for name, file in found.items() if file is not None}
    return CodedWeights(files, platform) if files else None


class CodedWeights:
    """
    The coded files of the components that stream.

    Args:
        files (`Mapping[str, CodedFile]`): by component.
        platform (`Platform`): of the onload device.

    Attributes:
        stamps (`dict[str, FileStamp]`): of the files, from before they were looked at.
        codec (`Codec`): of them all.

    Raises:
        `RuntimeError`: as `find_coded`.
    """

    def __init__(self, files: Mapping[str, CodedFile], platform: Platform) -> None:
        self._files = dict(files)
        self.stamps: dict[str, FileStamp] = {}
        for file in files.values():
            self.stamps[file.path] = _stamp_of(file)
        names = sorted({file.codec for file in files.values()})
        if len(names) > 1:
            raise RuntimeError(
                f"The components were coded by different codecs ({', '.join(names)}); pack them with the same one."
            )
        self._decodes_in_place = names[0] in platform.codecs and platform.registers_host_memory
        self.codec: Codec = platform.open_codec(names[0])
        for file in files.values():
            check_version(self.codec, file.codec_version, file.path)

    def lines(self) -> Iterator[str]:
        """What all ranks have to agree on, a line each."""
        for name, file in self._files.items():
            yield f"coded weights of '{name}': {self.stamps[file.path]} {file.content} for {file.ranks} ranks"

    def fit(self, config: DistributedLayerwiseOffloadConfig, group_size: int) -> DistributedLayerwiseOffloadConfig:
        """
        The options with `transfer="auto"` decided where coded shards would stream, and are cut for another number of
        ranks: whoever copies whole blocks can use any. What is decoded into memory is cut as the group wants.

        Raises:
            `ValueError`: they ask for `all_gather` of such shards, with what serves this group.
        """
        other = next((file for file in self._files.values() if file.ranks != group_size), None)
        if other is None or not self._streams_coded(config.host) or config.transfer_for(group_size) == "local":
            return config
        why = f"'{other.path}' was packed for groups of {other.ranks}, and this one has {group_size} ranks"
        if config.transfer == "auto":
            logger.info(f"local is taken: {why}")
            return replace(config, transfer="local")
        raise ValueError(
            f'\'transfer\' is "all_gather", and {why}. Use transfer="local", or host="packed", which decodes the '
            f"weights into memory, or pack them anew: {other.repack_command(group_size)}"
        )

    def _streams_coded(self, kind: str) -> bool:
        """Whether coded shards stream as they lie there, for a `host` option."""
        return kind == "coded" or (kind == "auto" and self._decodes_in_place)

    def check_streams(self, resident: Mapping[str, Sequence[OwnedTensor]]) -> None:
        """
        Refuses coded tensors that would not stream; `resident` are those of each component that do not.

        Raises:
            `RuntimeError`: naming one.
        """
        for component, owned in resident.items():
            missing = next((item.name for item in owned if item.tensor.is_meta), None)
            if missing is not None:
                raise self._mismatch(component, missing, "and would not stream")

    def attach(self, plan: OffloadPlan, owned: Sequence[Sequence[OwnedTensor]]) -> OffloadPlan:
        """
        A plan by which coded blocks stream from their shards; `owned` are the tensors of its units.

        Raises:
            `RuntimeError`: a block is coded as something else than it is in this model.
        """
        tensors = iter(owned)
        components = []
        for component in plan.components:
            blocks, leaves = (
                tuple(self._attach(component, unit, next(tensors)) for unit in units)
                for units in (component.blocks, component.leaves)
            )
            components.append(replace(component, blocks=blocks, leaves=leaves))
        return replace(plan, components=tuple(components), host="coded")

    def _attach(self, component: ComponentPlan, unit: BlockLayout, owned: Sequence[OwnedTensor]) -> BlockLayout:
        block = self._find(component.name, unit, owned)
        return unit if block is None else replace(unit, coded=block)

    def _find(self, component: str, unit: BlockLayout, owned: Sequence[OwnedTensor]) -> CodedBlock | None:
        missing = [item.name for item in owned if item.tensor.is_meta]
        if not missing:
            return None
        file = self._files[component]
        block = file.blocks.get(unit.name)
        if block is None or block.digest != unit.digest or len(missing) < len(owned):
            raise self._mismatch(component, missing[0], f"and not as a part of '{unit.name}' as this model has it")
        return block

    def _mismatch(self, component: str, tensor: str, how: str) -> RuntimeError:
        return RuntimeError(
            f"'{tensor}' of '{component}' is coded in '{self._files[component].path}', {how}: 'blocks' are others "
            "than it was packed with, or the version of diffusers or of this package is. Decode the checkpoint with "
            "`diffusers-dlo pack --decode`, and pack it anew."
        )

    def rank_plans(self, kind: str, plan: OffloadPlan, coded: OffloadPlan) -> list[OffloadPlan]:
        """
        The plans to try, in order, for a `host` option; the same on all ranks.

        Args:
            kind (`str`): the option.
            plan (`OffloadPlan`): that of a store which keeps weights in memory.
            coded (`OffloadPlan`): that of a coded store.

        Raises:
            `RuntimeError`: the option asks for what cannot be done with coded weights here.
        """
        if kind == "mapped":
            raise RuntimeError(
                'host="mapped" has weights stream from their files as they lie there, and these are coded. Use '
                'host="auto".'
            )
        if kind == "coded" and not self._decodes_in_place:
            raise RuntimeError(
                f"host=\"coded\" needs a device that decodes '{self.codec.name}', and this one does not. Use "
                'host="auto", which decodes the weights into memory.'
            )
        if kind in ("packed", "pinned"):
            return [replace(plan, host=kind)]
        if kind == "coded":
            return [coded]
        in_memory = [replace(plan, host="packed"), replace(plan, host="pinned")]
        if self._streams_coded(kind):
            return [coded, *in_memory]
        logger.info(f"Blocks are decoded into memory once: this device does not decode '{self.codec.name}'")
        return in_memory

    def values(self, component: str, unit: BlockLayout) -> list[torch.Tensor]:
        """
        The values of a coded block's tensors, on the host.

        Raises:
            `RuntimeError`: it is damaged, or its file cannot be found any more.
        """
        file = self._files[component]
        block = file.blocks[unit.name]
        with closing(MappedFile(file.path, self.stamps[file.path])) as mapped:
            sources = (mapped.content[shard.place.offset :][: shard.place.nbytes] for shard in block.shards)
            image = BlockReader(self.codec).read(block, sources)
        return [tensor_view(image, tensor) for tensor in unit.tensors]


def _stamp_of(file: CodedFile) -> FileStamp:
    """The stamp of a file that is still what it was when its model was loaded."""
    try:
        stamp = FileStamp.of(file.path)
    except OSError as error:
        raise RuntimeError(
            f"'{file.path}' cannot be found any more ({error.strerror}). Load the model again."
        ) from error
    if read_coded_file(file.path) != file:
        raise RuntimeError(f"'{file.path}' is another file than the model was loaded from. Load the model again.")
    return stamp
