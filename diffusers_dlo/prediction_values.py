# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Owns a prediction in plain values, as a JSON file holds them. Must not compute what it shows, nor write files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .usage_code import code_to_paste


if TYPE_CHECKING:
    from .offload_plan import ComponentPlan
    from .outline import Outline
    from .prediction import Option, Prediction


def as_values(outline: Outline, prediction: Prediction) -> dict[str, Any]:
    """Everything in plain values, for a JSON file: bytes and seconds."""
    return {
        "model": outline.model,
        "class": outline.class_name,
        "dtype": str(outline.dtype).removeprefix("torch."),
        "cast_bytes": outline.cast_nbytes,
        "assumed": {
            "h2d_bytes_per_second": prediction.machine.links.h2d,
            "gather_bytes_per_second": prediction.machine.links.gather,
            "gather_slowdown": prediction.machine.links.gather_slowdown,
            "decode_bytes_per_second": prediction.machine.links.decode,
            "tokens": prediction.work.tokens,
            "text_tokens": prediction.work.text_tokens,
            "compute": "estimate" if prediction.work.compute_seconds is None else "given",
            "tflops": prediction.work.tflops,
        },
        "device_bytes": prediction.machine.device_nbytes,
        "host_bytes": prediction.machine.host_nbytes,
        "components": [
            {
                "name": component.name,
                "class": component.class_name,
                "transfer": component.transfer,
                "blocks": len(component.blocks),
                "largest_block_bytes": component.largest_block.nbytes,
                "streamed_bytes": component.streamed_nbytes,
                "on_demand_bytes": sum(leaf.nbytes for leaf in component.leaves),
                "placed_bytes": component.placed_nbytes,
                **_coded_values(outline, component),
            }
            for component in prediction.options[0].plan.components
        ]
        + [
            {"name": name, "class": class_name, "transfer": "placed", "placed_bytes": nbytes}
            for name, class_name, nbytes in prediction.options[0].plan.placed
        ],
        "options": [_option_values(option) for option in prediction.options],
        "recommended": None if prediction.best is None else prediction.options.index(prediction.best),
        "coding": _coding_values(prediction),
        "shortfalls": list(prediction.shortfalls),
        "code": code_to_paste(outline, prediction),
        "simulated": [
            {"devices": scale.devices, "hosts": scale.hosts, **_option_values(scale.option)}
            for scale in prediction.scaling
        ],
    }


def _coded_values(outline: Outline, component: ComponentPlan) -> dict[str, Any]:
    """What a coded component has beside others."""
    file = outline.coded.get(component.name)
    if file is None:
        return {}
    nbytes = sum(block.coded_nbytes for block in file.blocks.values())
    return {"codec": file.codec, "coded_ranks": file.ranks, "coded_bytes": nbytes}


def _coding_values(prediction: Prediction) -> dict[str, Any] | None:
    coding = prediction.coding
    if coding is None:
        return None
    return {
        "is_coded": coding.is_coded,
        "assumed_ratio": None if coding.is_coded else prediction.machine.coded_ratio,
        "helps": coding.helps,
        "plain": _option_values(coding.plain),
        "coded": _option_values(coding.coded),
    }


def _option_values(option: Option) -> dict[str, Any]:
    memory = option.memory
    return {
        "ranks": option.plan.group_size,
        "transfer": option.transfer,
        "gather": option.gather or None,
        "num_slots": option.plan.num_slots,
        "device_budget": option.budget,
        "fits": option.fits,
        "seconds": option.seconds,
        "limit_seconds": option.limit_seconds,
        "forwards": {
            forward.component: {
                "seconds": forward.seconds,
                "compute_seconds": forward.simulation.compute_seconds,
                "copy_seconds": forward.simulation.copy_seconds,
                "decode_seconds": forward.simulation.decode_seconds,
                "exposed_seconds": forward.simulation.exposed_seconds,
                "link_idle": forward.simulation.link_idle,
                "h2d_bytes": forward.simulation.h2d_nbytes,
                "gather_bytes": forward.simulation.gather_nbytes,
            }
            for forward in option.forwards
        },
        "device_memory": {
            "slots": memory.slots,
            "placed": memory.placed,
            "on_demand": memory.on_demand,
            "residents": memory.residents,
            "activations_estimate": memory.activations,
            "decoding": memory.decoding,
            "total": memory.total,
        },
        "host_weights_bytes": option.host_nbytes,
        "host_pinned_bytes": option.pinned_nbytes,
    }
