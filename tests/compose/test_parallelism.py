# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Context parallelism with real gloo ranks: bit-equal to the same without offload, in both orders of enabling, with ranks
that are late; what splits weights is refused.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, ParallelConfig, TensorParallelConfig
from diffusers.hooks import MagCacheConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from diffusers_dlo import OffloadHandle, apply_distributed_layerwise_offload
from diffusers_dlo.distributed.companions import companions_in_group, find_conflict, missing_companions
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy
from tests.zoo import MODELS, build, run


_LATE = 0.4
"""Seconds by which a rank is late: several times the grace of these tests."""
OPTIONS: dict[str, Any] = {"transfer": "all_gather", "grace": 0.1, "timeout": 30.0}


def inputs(name: str, seed: int) -> dict[str, Any]:
    """Those of the zoo, with a prompt whose length two ranks can share."""
    kwargs = MODELS[name].inputs(seed)
    if name == "flux":
        generator = torch.Generator().manual_seed(seed)
        kwargs["encoder_hidden_states"] = torch.randn(1, 6, 24, generator=generator)
        kwargs["txt_ids"] = torch.zeros(6, 3)
    return kwargs


def split(model: nn.Module, mesh: DeviceMesh | None = None, **degrees: Any) -> None:
    """Context parallelism by diffusers, which asks for an accelerator's mesh where we have CPUs."""

    def resolve(config: ContextParallelConfig) -> ParallelConfig:
        resolved = ParallelConfig(context_parallel_config=config)
        used = config.mesh or init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
        resolved.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=used)
        model._parallel_config = resolved
        return resolved

    model._resolve_parallel_config = resolve
    model.set_attention_backend("_native_flash" if "ring_degree" in degrees else "native")
    model.enable_parallelism(config=ContextParallelConfig(mesh=mesh, **degrees))


def lend_flash_attention() -> torch.library.Library:
    """
    Ring attention needs a backend that returns its normalizer, and diffusers' only one in torch has no CPU kernel. Has
    torch call the CPU's own flash attention there, for as long as the library lives.
    """
    library = torch.library.Library("aten", "IMPL")

    def attend(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
        attend_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, normalizer = attend_on_cpu(query, key, value, dropout_p, is_causal, scale=scale)
        none = torch.empty(0)
        return output, normalizer, none, none, query.shape[2], key.shape[2], none, none, none

    library.impl("_scaled_dot_product_flash_attention", attend, "CPU")
    return library


def assert_equal(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: object) -> None:
    assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected)), what
    assert not any(tensor.isnan().any() for tensor in got), what


def assert_in_step(handle: OffloadHandle, passes: int, ghost_passes: int = 0) -> None:
    report = handle.report()
    assert (report.transfer, report.passes, report.ghost_passes) == ("all_gather", passes, ghost_passes)


# ------------------------------------------------------------------------------------------------------- two ranks


def check_both_orders(rank: int, name: str, degrees: dict[str, Any]) -> None:
    """Enabled before and after the split: both equal to the split model without offload, and disabled still so."""
    whole, reference = build(name, 3), build(name, 3)
    split(reference, **degrees)
    expected = [run(reference, inputs(name, seed)) for seed in range(2)]
    alone = run(whole, inputs(name, 0))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected[0], alone)), "the split itself"
    for order in ("split first", "offload first"):
        model = build(name, 3)
        if order == "split first":
            split(model, **degrees)
        handle = apply_distributed_layerwise_offload(model, **OPTIONS)
        if order == "offload first":
            split(model, **degrees)
        for seed in range(2):
            assert_equal(run(model, inputs(name, seed)), expected[seed], (name, degrees, order))
        handle.remove()
        assert handle.report().passes == 2
        assert_equal(run(model, inputs(name, 0)), expected[0], (name, degrees, order, "disabled while split"))


def check_late_companions(rank: int) -> None:
    """One rank is late, at the beginning of a forward and between two blocks: the other waits, and no pass is lost."""
    reference, model = build("flux", 3), build("flux", 3)
    handle = apply_distributed_layerwise_offload(model, **OPTIONS)
    pauses = [0.0]
    model.transformer_blocks[0].register_forward_hook(lambda *_: time.sleep(pauses[0]))
    for module in (reference, model):
        split(module, ulysses_degree=2)
    for step in range(6):
        expected = run(reference, inputs("flux", step))
        if step % 3 == 1 + rank % 2:
            time.sleep(_LATE)
        pauses[0] = _LATE if step in (3 + rank, 5) else 0.0
        assert_equal(run(model, inputs("flux", step)), expected, step)
    assert_in_step(handle, passes=6)
    handle.remove()


def check_with_a_cache(rank: int) -> None:
    """A step cache that leaves out whole steps, over the split and under it."""
    for cache_first, options in ((True, OPTIONS), (False, {**OPTIONS, "device_budget": 300_000})):
        reference, model = build("flux", 3), build("flux", 3)
        handle = apply_distributed_layerwise_offload(model, **options)
        for module in (reference, model):
            for part in ("cache", "split") if cache_first else ("split", "cache"):
                if part == "split":
                    split(module, ulysses_degree=2)
                else:
                    module.enable_cache(
                        MagCacheConfig(
                            mag_ratios=[1.0] * 5, num_inference_steps=5, max_skip_steps=2, retention_ratio=0.2
                        )
                    )
        for step in range(5):
            outputs = []
            for module in (reference, model):
                with module.cache_context("cond"):
                    outputs.append(run(module, inputs("flux", step)))
            assert_equal(outputs[1], outputs[0], (cache_first, step))
        report = handle.report()
        assert (report.skipped_blocks, report.resident_bytes > 0) == (12, not cache_first), (
            "three steps of four blocks"
        )
        if cache_first:
            assert_in_step(handle, passes=2)
        handle.remove()


def check_absent_companions(rank: int) -> None:
    """A companion that has no more work, or does not come: an error with its name, and then all goes on."""
    reference, model = build("wan", 3), build("wan", 3)
    for module in (reference, model):
        split(module, ulysses_degree=2)
    handle = apply_distributed_layerwise_offload(model, **{**OPTIONS, "timeout": 1.0})
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 0 has waited 1 s to compute .* rank 1 .* did not come"):
            run(model, inputs("wan", 0))
    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match="together with rank 1 .context parallelism., and rank 1 has no more"):
            run(model, inputs("wan", 0))
    handle.join()
    for seed in range(2):
        assert_equal(run(model, inputs("wan", seed)), run(reference, inputs("wan", seed)), seed)
    assert_in_step(handle, passes=2)
    handle.remove()


def check_a_failing_companion(rank: int) -> None:
    """A rank raises inside a block: the other's collective ends in its own time, and the offload is as it was."""
    model, other, reference = build("wan", 4), build("ltx", 3), build("ltx", 3)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), mesh["ulysses"].get_group())
    split(model, mesh, ulysses_degree=2)
    handles = [apply_distributed_layerwise_offload(module, **OPTIONS) for module in (model, other)]
    if rank == 1:
        model.blocks[1].attn1.register_forward_pre_hook(_fail)
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError if rank == 1 else RuntimeError):
        run(model, inputs("wan", 0))
    assert time.monotonic() - start < 20
    other.set_attention_backend("native")
    for step in range(2):
        seed = 10 * rank + step
        assert_equal(run(other, inputs("ltx", seed)), run(reference, inputs("ltx", seed)), seed)
    for handle in reversed(handles):
        assert handle.report().transfer == "all_gather"
        handle.remove()
    weights = build("wan", 4).state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def check_own_seams(rank: int) -> None:
    """Cosmos3's seams for context parallelism are free; with `uneven="error"`, a rank may be late there too."""
    reference, model = build("cosmos3", 3), build("cosmos3", 3)
    whole = run(reference, inputs("cosmos3", 0))
    handle = apply_distributed_layerwise_offload(model, **OPTIONS, uneven="error")
    assert model._cp_shard_fn is None and model._cp_gather_fn is None
    for module in (reference, model):
        put_seams(module, rank)
    seams = model._cp_shard_fn, model._cp_gather_fn
    for step in range(3):
        expected = run(reference, inputs("cosmos3", step))
        if step == 1 + rank:
            time.sleep(_LATE)
        assert_equal(run(model, inputs("cosmos3", step)), expected, step)
        if step == 0:
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(expected, whole)), "the seams themselves"
    assert_in_step(handle, passes=3)
    handle.remove()
    assert (model._cp_shard_fn, model._cp_gather_fn) == seams
    assert_equal(run(model, inputs("cosmos3", 2)), expected, "disabled")


def put_seams(model: nn.Module, rank: int) -> None:
    """Splits the generated tokens among two ranks; attention gathers them."""

    def gather(part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    def half(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(2)[rank]

    def shard(und: torch.Tensor, gen: torch.Tensor, rotary: tuple) -> tuple:
        return und, half(gen), (*rotary[:2], half(rotary[2]), half(rotary[3]))

    def attend_with(inner: Callable) -> Callable:
        def attend(attn: nn.Module, und: torch.Tensor, gen: torch.Tensor, rotary: tuple) -> tuple:
            und, gen = inner(attn, und, gather(gen), (*rotary[:2], gather(rotary[2]), gather(rotary[3])))
            return und, half(gen)

        return attend

    model._cp_shard_fn, model._cp_gather_fn = shard, lambda und, gen: (und, gather(gen))
    for layer in model.layers:
        layer.self_attn.processor = attend_with(layer.self_attn.processor)


def check_split_weights(rank: int, size: int) -> None:
    """FSDP before enabling is refused; after it, it refuses streamed weights by itself, and they all come back."""
    mesh = init_device_mesh("cpu", (size,))
    sharded = fully_shard(toy(toys.Stack, 3), mesh=mesh)
    for transfer, error in (("all_gather", ValueError), ("local", NotImplementedError)):
        with pytest.raises(error, match="'inp.weight' of 'model' is a DTensor.*Load ordinary weights"):
            apply_distributed_layerwise_offload(sharded, transfer=transfer)
    with torch.no_grad():
        assert torch.equal(sharded(feed(0)), toy(toys.Stack, 3)(feed(0)))
    for part in (lambda model: model, lambda model: model.blocks[1], lambda model: model.blocks[1].up):
        model = toy(toys.Stack, 3)
        handle = apply_distributed_layerwise_offload(model, **OPTIONS)
        with pytest.raises(NotImplementedError, match="FSDP does not support non-contiguous parameters"):
            fully_shard(part(model), mesh=mesh)
        handle.remove()
        weights = toy(toys.Stack, 3).blocks.state_dict()
        assert all(torch.equal(value, weights[key]) for key, value in model.blocks.state_dict().items())


def _on_two_ranks(rank: int, size: int) -> None:
    library = lend_flash_attention()
    for degrees in ({"ulysses_degree": 2}, {"ring_degree": 2}):
        check_both_orders(rank, "flux", degrees)
    check_both_orders(rank, "qwenimage", {"ulysses_degree": 2})  # with a mask, and a plan that names every block
    check_both_orders(rank, "wan", {"ulysses_degree": 2, "ulysses_anything": True})
    del library
    check_late_companions(rank)
    check_with_a_cache(rank)
    check_absent_companions(rank)
    check_own_seams(rank)
    check_split_weights(rank, size)
    check_a_failing_companion(rank)


def test_two_ranks() -> None:
    run_ranks(2, _on_two_ranks)


# ------------------------------------------------------------------------------------------------------ four ranks


def _pairs(rank: int, size: int) -> list[tuple[int, int]]:
    """Two requests, each computed by a pair of ranks; the first pair has more steps, and ranks are late in turn."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("requests", "ring", "ulysses"))
    across = init_device_mesh("cpu", (2, 2)).mesh.T.contiguous()
    layouts = (None, init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", across))
    counts = []
    for layout in layouts:
        reference, model = build("wan", 3), build("wan", 3)
        handle = apply_distributed_layerwise_offload(model, **OPTIONS, mesh=layout)
        for module in (reference, model):
            split(module, mesh, ulysses_degree=2)
        steps = 4 if rank < 2 else 2
        for step in range(steps):
            seed = 10 * (rank // 2) + step
            expected = run(reference, inputs("wan", seed))
            if step == rank % 2:
                time.sleep(_LATE)
            if layout is layouts[2] and rank < 2 and step >= 2:
                with pytest.raises(RuntimeError, match="rank 1 has no more work. .* 'mesh' has them in one row"):
                    run(model, inputs("wan", seed))
            else:
                assert_equal(run(model, inputs("wan", seed)), expected, (rank, step))
        handle.join()
        report = handle.report()
        assert report.transfer == "all_gather"
        counts.append((report.passes, report.ghost_passes))
        handle.remove()
    return counts


def test_two_pairs_with_requests_of_their_own() -> None:
    """
    One group of four, where passes are shared; a group for each pair, where they are not; and groups across pairs,
    which have to have equal work.
    """
    results = run_ranks(4, _pairs)
    together, apart, across = zip(*results)
    assert [passes for passes, _ in together] == [4, 4, 2, 2]
    assert len({sum(counts) for counts in together}) == 1, "every rank takes part in every pass"
    assert apart == ((4, 0), (4, 0), (2, 0), (2, 0))
    assert across == ((2, 0),) * 4


# --------------------------------------------------------------------------------------------------------- refusals


def test_tensor_parallelism_is_refused_while_enabled() -> None:
    model, reference = build("flux", 3), build("flux", 3)
    handle = apply_distributed_layerwise_offload(model)
    for config in (
        TensorParallelConfig(tp_degree=2),
        ParallelConfig(tensor_parallel_config=TensorParallelConfig(tp_degree=2)),
    ):
        with pytest.raises(ValueError, match="'enable_parallelism' is refused while 'model' .* Use one of the two"):
            model.enable_parallelism(config=config)
    assert model._parallel_config is None
    assert_equal(run(model, inputs("flux", 0)), run(reference, inputs("flux", 0)), "after the refusal")
    handle.remove()
    assert "enable_parallelism" not in vars(model)


def test_whose_asks_count() -> None:
    """The rule by which ranks that compute together begin together, for a group of four with two pairs."""

    def says(kind: str, component: str = "a", companions: Sequence[int] = ()) -> dict[str, Any]:
        return {"kind": kind, **({"component": component, "companions": companions} if kind == "run" else {})}

    first = says("run", companions=(0, 1))
    assert missing_companions(0, [first, first, says("ghost"), says("bye")]) == []
    assert missing_companions(0, [first, says("ghost"), first, first]) == [1]
    assert find_conflict(0, [first, says("ghost"), first, first]) is None
    assert "rank 1 has no more work" in (find_conflict(0, [first, says("bye")]) or "")
    other = says("run", "b", (0, 1))
    assert "'a', which it computes together with rank 1" in (find_conflict(0, [first, other]) or "")
    assert find_conflict(0, [first, says("run", "b")]) is None, "it computes that alone, and comes after it"
    assert companions_in_group((4, 6), (4, 5, 6, 7)) == [0, 2]
    assert companions_in_group((4, 8), (4, 5, 6, 7)) == [0, 1, 2, 3]
    assert companions_in_group((), (4, 5)) == []
