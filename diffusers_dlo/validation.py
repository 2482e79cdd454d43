# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns every refusal of a module or pipeline before anything is changed. Must not change anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from accelerate.hooks import CpuOffload
from torch import nn

from .casts import pending_casts
from .checkpoint.pending_guard import find_change
from .coding.coded_guard import is_guarded_coded
from .coding.loading import coded_file_of, moved_tensor
from .compilation import recorded_graphs_text, records_graphs
from .config import DistributedLayerwiseOffloadConfig
from .device.onload import is_same_device
from .quantized_parameter import has_own_memory, is_known_parameter, why_not_ready
from .tensor_utils import is_dtensor
from .wrapped_tensor import is_wrapper, why_not_wrapped


_FOREIGN_HOOKS = {
    "group_offloading": "group offloading is active",
    "layerwise_casting": "layerwise casting is active",
    "layer_execution_tracker": "group offloading is active",
    "lazy_prefetch_group_offloading": "group offloading is active",
}


def refuse_foreign_offload(root: nn.Module, name: str) -> None:
    """
    Refuses a model whose weights something else moves or casts.

    Raises:
        `ValueError`: an accelerate hook, group offloading or layerwise casting is on it.
    """
    for path, module in root.named_modules():
        refuse_foreign_hooks(module, f"{name}.{path}" if path else name)


def refuse_foreign_hooks(module: nn.Module, path: str, device: torch.device | None = None) -> None:
    """
    As `refuse_foreign_offload`, for the hooks of one module alone. With `device`, the one it streams to, what
    `enable_model_cpu_offload` put on it since is let be: it calls `.to`, which moves nothing that streams.
    """
    attributes = vars(module)
    registry = attributes.get("_diffusers_hook")
    for hook, reason in _FOREIGN_HOOKS.items():
        if registry is not None and registry.get_hook(hook) is not None:
            raise ValueError(
                f"'{path}' cannot be put under distributed layerwise offload: {reason} on it. "
                "Reload it without that, or use one of the two; components=[...] leaves a component of a pipeline to "
                "the other."
            )
    foreign = attributes.get("_hf_hook")
    if isinstance(foreign, CpuOffload) and device is not None and is_same_device(foreign.execution_device, device):
        return
    if foreign is not None:
        raise ValueError(
            f"'{path}' cannot be put under distributed layerwise offload: accelerate moves its weights (a "
            f"{type(foreign).__name__} is on it). Call pipe.remove_all_hooks(), or load without it. "
            "pipe.enable_model_cpu_offload() may follow when this offload is enabled."
        )


def is_moved_by_others(module: nn.Module) -> bool:
    """Whether group offloading or accelerate decides where the weights of a component are."""
    names = [name for name in _FOREIGN_HOOKS if name != "layerwise_casting"]
    for part in module.modules():
        registry = vars(part).get("_diffusers_hook")
        if "_hf_hook" in vars(part) or any(registry is not None and registry.get_hook(name) for name in names):
            return True
    return False


def validate_module(module: nn.Module, name: str, transfer: str) -> None:
    """
    Refuses a module that cannot stream.

    Args:
        module (`nn.Module`): the component, unwrapped.
        name (`str`): what to call it in messages.
        transfer (`str`): the resolved transfer, `"all_gather"` or `"local"`.

    Raises:
        `TypeError`: not a module. `ValueError`: something else moves its weights, they are sharded, or were quantized
        while loading and would be gathered, or are still to be quantized, or it is compiled in a way that fixes
        addresses. `NotImplementedError`: tensor types not supported yet. `RuntimeError`: weights without values (on
        the meta device).
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"'{name}' must be a torch.nn.Module, got {type(module).__name__!r}.")
    refuse_foreign_offload(module, name)
    _refuse_sharded(module, name, transfer)
    _refuse_quantized(module, name, transfer)
    _refuse_not_ready(module, name)
    for path, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            raise NotImplementedError(
                f"'{path or name}' of '{name}' is a TorchScript module, whose weights cannot be re-pointed. Use the "
                "module it was scripted from."
            )
        if getattr(submodule, "merged", None) is True and hasattr(submodule, "merged_adapters"):
            raise ValueError(
                f"'{path}' of '{name}' has an adapter merged into its weights, which PEFT would take out again in "
                "forward. After fuse_lora() call unload_lora_weights(), or unfuse it."
            )
        for compiled in (submodule._compiled_call_impl, vars(submodule).get("forward")):
            refuse_fixed_addresses(submodule, compiled, name)
    _refuse_meta(module, name)


def validate_placed(module: nn.Module, name: str) -> None:
    """
    Refuses a component that is only placed on the device, but cannot be.

    Raises:
        `ValueError`: its weights are still to be quantized, or coded. `RuntimeError`: weights without values.
    """
    _refuse_not_ready(module, name)
    coded = coded_file_of(module)
    if coded is not None:
        raise ValueError(
            f"'{name}' is coded ('{coded.path}'), and would not stream: only a model that streams is decoded. Have it "
            "stream too, with components=[...], or decode it with `diffusers-dlo pack --decode`."
        )
    _refuse_meta(module, name)


def refuse_fixed_addresses(module: nn.Module, compiled: object, name: str) -> None:
    """
    Refuses what was compiled into device graphs, which replay with the addresses they recorded.

    Raises:
        `ValueError`: naming the mode.
    """
    if records_graphs(compiled):
        raise ValueError(recorded_graphs_text(name, type(module).__name__))


def _refuse_meta(module: nn.Module, name: str) -> None:
    coded = coded_file_of(module)
    names = coded.tensor_names if coded is not None else set()
    tensors = dict(_tensors(module))
    changed = next((path for path in names if path in tensors and not tensors[path].is_meta), None)
    if changed is not None:
        raise ValueError(
            f"'{changed}' of '{name}' was given values after the model was loaded from a coded checkpoint, and they "
            "would be lost. Enable first and change it then."
        )
    for path, tensor in tensors.items():
        if not tensor.is_meta or path in names:
            continue
        if any(map(is_guarded_coded, module.modules())):
            raise RuntimeError(
                f"'{path}' of '{name}' has no values: it is coded, and '{name}' is not the model as it was loaded. "
                "Enable that model itself, and change it then, or decode the checkpoint with `diffusers-dlo pack "
                "--decode`."
            )
        raise RuntimeError(
            f"'{path}' of '{name}' has no values (it is on the meta device). Load it from safetensors with "
            "from_pretrained, or with load_mapped_checkpoint, before enabling."
        )
    moved = moved_tensor(module)
    if moved is not None:
        raise ValueError(
            f"'{moved}' of '{name}' is another tensor than when the model was loaded from a coded checkpoint: blocks "
            "were put in another order, or weights exchanged or quantized, and values go by names. Change a model "
            "that was decoded, with `diffusers-dlo pack --decode`."
        )


def _refuse_sharded(module: nn.Module, name: str, transfer: str) -> None:
    # transformers keeps the degree on the model, diffusers in its parallel configuration.
    config = getattr(getattr(module, "_parallel_config", None), "tensor_parallel_config", None)
    mesh = getattr(config, "mesh", None)
    degree = mesh.size() if mesh is not None else getattr(config, "tp_degree", None)
    degree = degree or getattr(module, "_tp_size", None) or 1
    if degree > 1:
        raise ValueError(
            f"'{name}' is split by tensor parallelism of degree {degree}; layerwise offload shards by data-parallel "
            "rank. Use one of the two."
        )
    for path, tensor in _tensors(module):
        if is_dtensor(tensor):
            if transfer == "all_gather":
                raise ValueError(
                    f"'{path}' of '{name}' is a DTensor (FSDP, HSDP or tensor parallel), and all_gather would shard "
                    "it a second time. Load ordinary weights, or use one of the two."
                )
            raise NotImplementedError(
                f"'{path}' of '{name}' is a DTensor, which cannot be streamed. Load ordinary weights."
            )


def _refuse_quantized(module: nn.Module, name: str, transfer: str) -> None:
    quantizer = getattr(module, "hf_quantizer", None)
    if quantizer is not None and transfer == "all_gather" and not getattr(quantizer, "pre_quantized", False):
        raise ValueError(
            f"'{name}' was quantized while it was loaded ({type(quantizer).__name__}), by each rank for itself, and "
            "sharding would mix what they made. Save it quantized (save_pretrained) and load that, quantize it in "
            'place before enabling, or use transfer="local".'
        )
    for path, tensor in _tensors(module):
        if has_own_memory(tensor) and tensor.layout == torch.strided and not tensor.is_quantized:
            continue
        reason = why_not_wrapped(tensor) if is_wrapper(tensor) else ""
        if reason is None:
            continue
        reason = f", and {reason}" if reason else ""
        if transfer == "all_gather" and not has_own_memory(tensor):
            raise ValueError(
                f"'{path}' of '{name}' is a {type(tensor).__name__}{reason}, and sharding would break its layout. "
                "Load it unquantized."
            )
        raise NotImplementedError(
            f"'{path}' of '{name}' is a {type(tensor).__name__} of layout {tensor.layout}{reason}, which cannot be "
            "streamed yet. Load it as ordinary dense weights."
        )


def _refuse_not_ready(module: nn.Module, name: str) -> None:
    for path, tensor in _tensors(module):
        reason = why_not_ready(tensor) if is_known_parameter(tensor) else None
        if reason is not None:
            raise ValueError(f"'{path}' of '{name}' ({type(tensor).__name__}) {reason}.")


def refuse_enabled(name: str, enabled: bool) -> None:
    """
    Refuses a second enabling.

    Raises:
        `ValueError`: it is enabled already.
    """
    if enabled:
        raise ValueError(
            f"'{name}' is under distributed layerwise offload already. Disable it first to change options."
        )


def refuse_changed_before_cast(module: nn.Module, name: str, written_ids: Collection[int]) -> None:
    """
    Refuses weights that were changed while their cast was still pending: the change would be made before the cast, and
    not after it as everybody expects.

    Args:
        written_ids (`Collection[int]`): the ids of tensors that were written to after loading.

    Raises:
        `ValueError`: naming a tensor.
    """
    pending = [(path, tensor) for path, tensor in _tensors(module) if pending_casts(tensor)]
    if not pending:
        return
    written = next((f"'{path}' was written to" for path, tensor in pending if id(tensor) in written_ids), None)
    adapter = next((path for path, part in module.named_modules() if hasattr(part, "merged_adapters")), None)
    change = written or (f"'{adapter}' has got an adapter" if adapter is not None else find_change(module))
    if change is not None:
        raise ValueError(
            f"{change} in '{name}' after it was loaded under mapped_loading(), while weights were still to be cast: "
            "the change would come before the cast. Enable first and change it then, or load without mapped_loading()."
        )


def validate_blocks_option(config: DistributedLayerwiseOffloadConfig, components: Iterable[str]) -> None:
    """
    Refuses a `blocks` option that names a component which does not stream.

    Raises:
        `ValueError`: listing those that do.
    """
    components = list(components)
    if isinstance(config.blocks, Mapping):
        for name in config.blocks:
            if name not in components:
                raise ValueError(f"'blocks' names '{name}', which does not stream; these do: {', '.join(components)}.")
    elif config.blocks is not None and len(components) > 1:
        raise ValueError(
            f"'blocks' is a list, and {len(components)} components stream; pass a mapping from component to its "
            f"lists: {', '.join(components)}."
        )


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
