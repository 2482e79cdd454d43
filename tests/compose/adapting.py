# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Tiny pipelines, adapters for them, and playing a script on two of them: one is offloaded in it, the other is not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import peft
import torch
from diffusers import DiffusionPipeline, FluxPipeline, WanPipeline
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload
from diffusers_dlo.process_engine import find_streamed
from tests.zoo import MODELS, TEXT_ENCODERS, build, run


ZOO = {"transformer": "flux", "transformer_2": "wan", "text_encoder": "clip"}
ONE = ["to_q", "to_k", "ff.net.0.proj", "proj_out", "x_embedder"]  # in blocks and outside
TWO = ["to_q", "to_v"]
TEXT = ["q_proj", "v_proj"]
Script = Callable[[DiffusionPipeline, int], Iterator[str]]


def flux_pipe() -> FluxPipeline:
    """A transformer and a text encoder that both stream."""
    rest = dict.fromkeys(("scheduler", "vae", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return FluxPipeline(transformer=build("flux", 2), text_encoder=build("clip", 2), **rest)


def wan_pipe() -> WanPipeline:
    """Two transformers of different weights."""
    rest = dict.fromkeys(("scheduler", "vae", "tokenizer", "text_encoder"))
    return WanPipeline(transformer=build("wan", 3), transformer_2=build("wan", 3, seed=1), **rest)


def adapter(name: str, targets: list[str], seed: int, config: type = peft.LoraConfig, **options: Any) -> dict:
    """A state dict of an adapter for a model of the zoo, with weights that all matter."""
    model = build(name, 3 if name == "wan" else 2)
    torch.manual_seed(seed)
    if config is peft.LoraConfig:
        options = {"r": 4, "init_lora_weights": False, **options}
    peft.inject_adapter_in_model(config(target_modules=targets, **options), model, "x")
    return peft.get_peft_model_state_dict(model, adapter_name="x")


def prefixed(prefix: str, state: dict) -> dict:
    """With the component's name before each key, as in a pipeline's file."""
    return {f"{prefix}.{key}": value for key, value in state.items()}


@functools.cache
def _one() -> dict:
    return {**prefixed("transformer", adapter("flux", ONE, 5)), **prefixed("text_encoder", adapter("clip", TEXT, 7))}


@functools.cache
def _two() -> dict:
    return prefixed("transformer", adapter("flux", TWO, 6, r=2))


def one() -> dict:
    """For the transformer and the text encoder."""
    return dict(_one())


def two() -> dict:
    """For the transformer, in other layers and of another rank."""
    return dict(_two())


def flux() -> nn.Module:
    """The same transformer by itself."""
    return build("flux", 2)


def outputs(pipe: Any, seed: int) -> list[torch.Tensor]:
    """What the transformers and the text encoder of a pipeline, or a single model, give for an input."""
    found = []
    for name, module in ({"transformer": pipe} if isinstance(pipe, nn.Module) else pipe.components).items():
        if isinstance(module, nn.Module):
            kind = "wan" if type(module).__name__.startswith("Wan") else ZOO[name]
            found += run(module, {**MODELS, **TEXT_ENCODERS}[kind].inputs(seed))
    return found


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Bit by bit."""
    return len(some) == len(others) and all(
        a.dtype == b.dtype and torch.equal(a, b) and not torch.isnan(a).any() for a, b in zip(some, others)
    )


def play(script: Script, make: Callable[[], Any], rank: int = 0, **options: Any) -> int:
    """
    Plays `script(pipe, rank)` on two pipelines that `make` gives. Where it yields "enable" and "disable", that is done
    to one of them only; at each other word both are run, and must agree bit by bit: "base" says that the result is
    that of the untouched pipeline, "new" that it was not seen before, "same" that it is the last one's. Returns the
    number of comparisons.
    """
    subject, reference = make(), make()
    seen = [outputs(reference, 10 + rank)]
    handle, copied, count = None, [], 0
    try:
        for step, (word, other) in enumerate(zip(script(subject, rank), script(reference, rank), strict=True)):
            assert word == other
            if word == "enable":
                handle, copied = enable(subject, **options), []
                continue
            if word == "disable":
                handle.remove()
                assert_same_weights(subject, reference)
                handle = None
                continue
            before = handle.report().h2d_bytes if handle is not None else 0
            got, wanted = outputs(subject, 10 + rank), outputs(reference, 10 + rank)
            where = f"step {step} ({word}) of {script.__name__} on rank {rank} with {options}"
            assert equal(got, wanted), where
            assert equal(wanted, seen[0]) == (word == "base") or word == "same", where
            assert any(equal(wanted, old) for old in seen) == (word != "new"), where
            assert word != "same" or equal(wanted, seen[-1]), where
            seen.append(wanted)
            count += 1
            if handle is not None:
                copied.append(handle.report().h2d_bytes - before)
                assert rank_count() > 1 or len(set(copied[1:])) <= 1, f"{where}: an adapter is copied too: {copied}"
                assert_adapters_stay(subject)
                assert "device_budget" not in options or handle.report().resident_bytes > 0
    finally:
        if handle is not None:
            handle.remove()
    assert_same_weights(subject, reference)
    assert equal(outputs(subject, 30), outputs(reference, 30))
    return count


def enable(subject: Any, **options: Any) -> Any:
    """Streams every model of a pipeline, or a single one."""
    if isinstance(subject, nn.Module):
        return apply_distributed_layerwise_offload(subject, **options)
    names = [name for name, module in subject.components.items() if isinstance(module, nn.Module)]
    return subject.enable_distributed_layerwise_offload(components=names, **options)


def rank_count() -> int:
    """How many ranks share the weights."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def assert_adapters_stay(subject: Any) -> None:
    """No tensor of an adapter that came after enabling streams; base weights of the blocks do, under their names."""
    models = [subject] if isinstance(subject, nn.Module) else subject.components.values()
    for model in models:
        if isinstance(model, nn.Module):
            parameters = dict(model.named_parameters())
            adapters = [value for name, value in parameters.items() if "lora_" in name or "lokr_" in name]
            assert all(find_streamed(value) is None and value.stride()[-1:] != (0,) for value in adapters)
            assert any(find_streamed(value) is not None for value in parameters.values())


def assert_same_weights(subject: Any, reference: Any) -> None:
    """All weights of two pipelines or models, by name."""
    models = [(subject, reference)]
    if not isinstance(subject, nn.Module):
        models = [(m, reference.components[n]) for n, m in subject.components.items() if isinstance(m, nn.Module)]
    for model, other in models:
        wanted = other.state_dict()
        assert model.state_dict().keys() == wanted.keys()
        for key, value in model.state_dict().items():
            assert torch.equal(value, wanted[key]) and value.stride() == wanted[key].stride(), key
