# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Step caches on tiny real models, each set so that some steps are skipped, and other ones on each rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import NucleusMoEImageTransformer2DModel
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    HookRegistry,
    LayerSkipConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    TextKVCacheConfig,
    apply_layer_skip,
)
from torch import nn

from diffusers_dlo import OffloadHandle, apply_distributed_layerwise_offload
from tests.zoo import MODELS, build, flat


SEEDS = ((0, 0, 1, 1, 1, 0, 0), (0, 1, 1, 2, 2, 2, 0))
"""Of each step's input, for each rank: a cache that compares inputs skips a step with the input of the one before."""


@dataclass
class Clock:
    """The timestep that some caches ask for."""

    now: int = 0


@dataclass(frozen=True)
class Cache:
    """One cache on one model; `config` depends on the clock and the rank. `blocks`: whole blocks are skipped."""

    name: str
    model: str
    config: Callable[[Clock, int], Any]
    blocks: bool = True
    contexts: Sequence[str] = ("cond",)
    num_blocks: int = 3
    apply: Callable[[nn.Module, Any], None] = lambda model, config: model.enable_cache(config)
    remove: Callable[[nn.Module], None] = lambda model: model.disable_cache()


def _pab(clock: Clock, rank: int) -> PyramidAttentionBroadcastConfig:
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2 + rank, current_timestep_callback=lambda: clock.now
    )


def _faster(clock: Clock, rank: int) -> FasterCacheConfig:
    return FasterCacheConfig(
        spatial_attention_block_skip_range=2 + rank,
        spatial_attention_timestep_skip_range=(-1, 700),
        unconditional_batch_skip_range=3,
        unconditional_batch_timestep_skip_range=(-1, 700),
        tensor_format="BFCHW",
        current_timestep_callback=lambda: clock.now,
        attention_weight_callback=lambda _: 0.3,
    )


def _mag(clock: Clock, rank: int) -> MagCacheConfig:
    return MagCacheConfig(mag_ratios=[1.0] * 7, num_inference_steps=7, max_skip_steps=2 - rank, retention_ratio=0.2)


def _sea(clock: Clock, rank: int) -> SeaCacheConfig:
    return SeaCacheConfig(threshold=5.0, max_consecutive_cached=2 - rank)


def _lite(clock: Clock, rank: int) -> TaylorSeerCacheConfig:
    return TaylorSeerCacheConfig(
        use_lite_mode=True, cache_interval=3 - rank, disable_cache_before_step=2, taylor_factors_dtype=torch.float32
    )


def _attention_seer(clock: Clock, rank: int) -> TaylorSeerCacheConfig:
    return TaylorSeerCacheConfig(cache_interval=3 - rank, disable_cache_before_step=2)


def _remove_layer_skip(model: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(model).remove_hook("layer_skip_hook")


def _apply_cache_dit(model: nn.Module, config: Any) -> None:
    import cache_dit

    adapter = cache_dit.BlockAdapter(
        transformer=model,
        blocks=model.transformer_blocks,
        forward_pattern=cache_dit.ForwardPattern.Pattern_1,
        has_separate_cfg=True,
    )
    cache_dit.enable_cache(adapter, cache_config=config)


def _cache_dit_config(clock: Clock, rank: int) -> Any:
    import cache_dit

    # It averages what it decides by over all ranks, so all have to ask in the same steps.
    return cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=1, residual_diff_threshold=0.1
    )


def _remove_cache_dit(model: nn.Module) -> None:
    import cache_dit

    cache_dit.disable_cache(model)


_GUIDED = ("cond", "uncond")

CACHES = {
    cache.name: cache
    for cache in (
        Cache("first_block", "flux", lambda clock, rank: FirstBlockCacheConfig(threshold=0.05), contexts=_GUIDED),
        Cache("first_block_video", "hunyuanvideo", lambda clock, rank: FirstBlockCacheConfig(threshold=0.05)),
        Cache("mag", "flux", _mag, contexts=_GUIDED),
        Cache("sea", "wan", _sea, contexts=_GUIDED),
        Cache(
            "sea_stack", "cosmos3", lambda clock, rank: SeaCacheConfig(threshold=5.0, max_consecutive_cached=2 - rank)
        ),
        Cache("taylorseer_lite", "flux", _lite),
        Cache("taylorseer", "flux", _attention_seer, blocks=False),
        Cache("pyramid", "cogvideox", _pab, blocks=False),
        Cache("faster", "cogvideox", _faster, blocks=False),
        Cache("text_kv", "nucleus", lambda clock, rank: TextKVCacheConfig(), blocks=False, contexts=_GUIDED),
        Cache(
            "layer_skip",
            "cogvideox",
            lambda clock, rank: LayerSkipConfig(indices=[1 + rank], fqn="transformer_blocks"),
            apply=apply_layer_skip,
            remove=_remove_layer_skip,
        ),
        Cache("cache_dit", "flux", _cache_dit_config, apply=_apply_cache_dit, remove=_remove_cache_dit),
    )
    if cache.name != "cache_dit" or importlib.util.find_spec("cache_dit") is not None
}


def make(cache: Cache) -> nn.Module:
    """Its model, with weights that are the same each time."""
    if cache.model != "nucleus":
        return build(cache.model, cache.num_blocks)
    torch.manual_seed(0)
    model = NucleusMoEImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=cache.num_blocks,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
        dense_moe_strategy="leave_first_block_dense",
        num_experts=4,
        moe_intermediate_dim=20,
        capacity_factors=2.0,
    )
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            nn.init.normal_(parameter, std=0.1)  # is memory as it was found
    return model.eval()


def _nucleus_inputs(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(1, 12, 16, generator=generator),
        "timestep": torch.rand(1, generator=generator),
        "encoder_hidden_states": torch.randn(1, 5, 24, generator=generator),
        "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 0, 0]]),
        "img_shapes": [(1, 3, 4)],
        "attention_kwargs": {},
        "return_dict": False,
    }


@dataclass
class Denoising:
    """Steps of one rank with one cache: the same inputs, whatever model they go through."""

    cache: Cache
    rank: int = 0
    pattern: tuple[int, ...] | None = None
    clock: Clock = field(default_factory=Clock)
    _texts: dict[str, Any] = field(default_factory=dict)
    _inputs: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    @property
    def seeds(self) -> tuple[int, ...]:
        """One for each step."""
        return self.pattern or SEEDS[self.rank]

    def config(self) -> Any:
        """A new configuration of the cache."""
        return self.cache.config(self.clock, self.rank)

    def step(self, model: nn.Module, step: int) -> list[torch.Tensor]:
        """The outputs of one step, in all contexts."""
        self.clock.now = 900 - 110 * step
        outputs = []
        for context in self.cache.contexts:
            inputs = self._inputs_of(context, self.seeds[step])
            where = {"step_index": step, "sigma": 1 - step / 10, "num_inference_steps": len(self.seeds)}
            with torch.no_grad(), model.cache_context(context, **where):
                outputs += [tensor.clone() for tensor in flat(model(**inputs))]
        return outputs

    def run(self, model: nn.Module) -> list[torch.Tensor]:
        """The outputs of all steps."""
        return [tensor for step in range(len(self.seeds)) for tensor in self.step(model, step)]

    def _inputs_of(self, context: str, seed: int) -> dict[str, Any]:
        if (context, seed) not in self._inputs:
            make_inputs = _nucleus_inputs if self.cache.model == "nucleus" else MODELS[self.cache.model].inputs
            inputs = make_inputs(seed + 10 * len(context))
            if "encoder_hidden_states" in inputs:  # the prompt is the same tensor in all steps
                inputs["encoder_hidden_states"] = self._texts.setdefault(context, inputs["encoder_hidden_states"])
            self._inputs[context, seed] = inputs
        return self._inputs[context, seed]


class Counted:
    """Counts what a model without offload computes: calls of linear layers, and blocks that were computed."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.linears = 0
        self.blocks = 0
        firsts = {id(next(part for part in block.modules() if isinstance(part, nn.Linear))) for block in blocks}
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_pre_hook(self._count_block if id(part) in firsts else self._count)

    def _count(self, *_: object) -> None:
        self.linears += 1

    def _count_block(self, *_: object) -> None:
        self.linears += 1
        self.blocks += 1


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    """The same bits, and no NaN."""
    assert len(got) == len(expected)
    for index, (a, b) in enumerate(zip(got, expected)):
        assert torch.equal(a, b) and not torch.isnan(a).any(), f"{what}: output {index} differs"


def enable(model: nn.Module, **options: Any) -> OffloadHandle:
    """Puts it under offload."""
    return apply_distributed_layerwise_offload(model, **options)
