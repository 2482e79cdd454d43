# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Methods that would read, cast, copy or save weights that are not there: served, refused, or harmless."""

import copy
import pickle

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.hooks import FirstBlockCacheConfig, HookRegistry, ModelHook
from diffusers.hooks.group_offloading import apply_group_offloading

from diffusers_dlo import apply_distributed_layerwise_offload, is_distributed_layerwise_offload_enabled
from diffusers_dlo.marker import MARKER
from tests import toys
from tests.ranks import run_ranks
from tests.toys import feed, toy
from tests.zoo import MODELS, build, run


@pytest.fixture
def flux():
    model = build("flux", 3, dtype=torch.bfloat16)
    model.enable_distributed_layerwise_offload()
    yield model
    model.disable_distributed_layerwise_offload()


def expected() -> list[torch.Tensor]:
    return run(build("flux", 3, dtype=torch.bfloat16), MODELS["flux"].inputs(0))


def still_right(model: torch.nn.Module) -> None:
    assert all(torch.equal(a, b) for a, b in zip(run(model, MODELS["flux"].inputs(0)), expected()))


@pytest.mark.parametrize(
    "call,text",
    (
        (lambda m: m.fuse_qkv_projections(), "'fuse_qkv_projections' is refused.*Fuse before enabling"),
        (
            lambda m: m.transformer_blocks[1].attn.fuse_projections(),
            "'fuse_projections' is refused.*Fuse before enabling",
        ),
        (lambda m: m.enable_layerwise_casting(torch.float8_e4m3fn), "'enable_layerwise_casting' is refused"),
        (lambda m: m.enable_group_offload(torch.device("cpu")), "'enable_group_offload' is refused"),
        (lambda m: m.load_state_dict({}), "'load_state_dict' is refused.*Disable first"),
        (lambda m: m.fuse_lora(), "'fuse_lora' is refused"),
        (lambda m: m.to(torch.float32), "changing its dtype would cast placeholders. Cast before"),
        (lambda m: m.half(), "changing its dtype"),
        (lambda m: m.float(), "changing its dtype"),
        (lambda m: m.transformer_blocks[1].to(torch.float16), "changing its dtype"),
        (lambda m: m.transformer_blocks[0].attn.to_q.double(), "changing its dtype"),
        (lambda m: copy.deepcopy(m), "'__deepcopy__' is refused"),
        (lambda m: m.enable_distributed_layerwise_offload(), "is under distributed layerwise offload already"),
        (lambda m: apply_distributed_layerwise_offload(m), "is under distributed layerwise offload already"),
    ),
)
def test_refused(flux: FluxTransformer2DModel, call, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(flux)
    still_right(flux)


def test_pickling_does_not_write_placeholders(flux: FluxTransformer2DModel) -> None:
    for module in (flux, flux.transformer_blocks[0].attn.to_q):
        with pytest.raises(ValueError, match="'__reduce_ex__' is refused.*save_pretrained"):
            pickle.dumps(module)
        with pytest.raises(ValueError, match="'__deepcopy__' is refused"):
            copy.deepcopy(module)
    still_right(flux)


def test_moves_and_same_dtype_are_harmless(flux: FluxTransformer2DModel) -> None:
    assert flux.device.type == "cpu" and flux.dtype == torch.bfloat16
    flux.to("cpu").to(torch.bfloat16).to(device="cpu", dtype=torch.bfloat16).cpu().bfloat16().requires_grad_(False)
    still_right(flux)


def test_saving_writes_the_weights(flux: FluxTransformer2DModel, tmp_path) -> None:
    flux.save_pretrained(tmp_path, max_shard_size="200KB")
    loaded = FluxTransformer2DModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    reference = build("flux", 3, dtype=torch.bfloat16).state_dict()
    assert loaded.state_dict().keys() == reference.keys()
    assert all(torch.equal(value, reference[key]) for key, value in loaded.state_dict().items())
    part = flux.transformer_blocks[1].state_dict()
    assert all(torch.equal(value, reference[f"transformer_blocks.1.{key}"]) for key, value in part.items())


def _pinned_shards_cannot_be_saved(rank: int, size: int) -> None:
    model = toy(toys.Stack, 3)
    handle = apply_distributed_layerwise_offload(model, host="pinned")
    with pytest.raises(RuntimeError, match="not whole on any one rank.*packed"):
        model.state_dict()
    handle.remove()
    assert all(torch.equal(v, toy(toys.Stack, 3).state_dict()[k]) for k, v in model.state_dict().items())


def test_pinned_shards_cannot_be_saved() -> None:
    run_ranks(2, _pinned_shards_cannot_be_saved)


def test_written_buffers_are_saved_as_they_are() -> None:
    model, reference = toy(toys.Stack, 3, toys.CountingBlock), toy(toys.Stack, 3, toys.CountingBlock)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        for step in range(3):
            assert torch.equal(model(feed(step)), reference(feed(step)))
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in model.state_dict().items())
    assert model.blocks[0].calls[0] == 3
    handle.remove()
    assert model.blocks[0].calls[0] == 3


@pytest.mark.parametrize("grad_input", (False, True))
def test_gradients_are_refused(flux: FluxTransformer2DModel, grad_input: bool) -> None:
    inputs = MODELS["flux"].inputs(0)
    inputs = {k: v.bfloat16() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    if grad_input:
        flux.requires_grad_(False)
        inputs["hidden_states"].requires_grad_(True)
    with pytest.raises(RuntimeError, match="called with gradients enabled.*torch.no_grad"):
        flux(**inputs)
    still_right(flux)
    if grad_input:  # without anything to differentiate, gradient mode alone does no harm
        inputs["hidden_states"].requires_grad_(False)
        flux(**inputs)


def test_removing_the_marker_disables(flux: FluxTransformer2DModel) -> None:
    registry = HookRegistry.check_if_exists_or_initialize(flux)
    assert MARKER in registry.hooks
    registry.remove_hook(MARKER)
    assert not is_distributed_layerwise_offload_enabled(flux)
    assert not torch.isnan(flux.transformer_blocks[0].attn.to_q.weight).any()
    still_right(flux)


class Doubling(ModelHook):
    """Replaces forward, as cache hooks do."""

    def new_forward(self, module: torch.nn.Module, *args, **kwargs) -> object:
        return self.fn_ref.original_forward(*args, **kwargs) * 2


def test_hooks_over_and_under_the_marker_survive() -> None:
    model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
    registry = HookRegistry.check_if_exists_or_initialize(model)
    registry.register_hook(Doubling(), "under")
    handle = apply_distributed_layerwise_offload(model)
    registry.register_hook(Doubling(), "over")
    with torch.no_grad():
        assert torch.equal(model(feed(0)), reference(feed(0)) * 4)
        handle.remove()
        assert torch.equal(model(feed(0)), reference(feed(0)) * 4)
        registry.remove_hook("over")
        registry.remove_hook("under")
        assert torch.equal(model(feed(0)), reference(feed(0)))


def test_group_offload_by_function_is_noticed() -> None:
    model = toy(toys.Stack, 3)
    handle = apply_distributed_layerwise_offload(model)
    apply_group_offloading(
        model, onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    )
    with torch.no_grad(), pytest.raises(ValueError, match="group offloading is active"):
        model(feed(0))
    handle.remove()


def test_first_block_cache_is_right(flux: FluxTransformer2DModel) -> None:
    reference = build("flux", 3, dtype=torch.bfloat16)
    for model in (flux, reference):
        model.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    with torch.no_grad():
        for step in (0, 0, 1, 2):
            got, wanted = [], []
            for model, out in ((flux, got), (reference, wanted)):
                with model.cache_context("cond"):
                    out += run(model, MODELS["flux"].inputs(step))
            assert all(torch.equal(a, b) for a, b in zip(got, wanted)), step
    flux.disable_cache()


@pytest.mark.parametrize("early", (True, False), ids=("before", "after"))
def test_lora_before_and_after_enabling(early: bool) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=4, target_modules=["to_q", "to_k", "ff.net.0.proj"], init_lora_weights=False)

    def adapt(model: FluxTransformer2DModel) -> None:
        torch.manual_seed(5)
        model.add_adapter(config, "one")

    reference, model = build("flux", 3, dtype=torch.bfloat16), build("flux", 3, dtype=torch.bfloat16)
    adapt(reference)
    if early:
        adapt(model)
    model.enable_distributed_layerwise_offload()
    if not early:
        adapt(model)
    for step in range(2):
        got, wanted = run(model, MODELS["flux"].inputs(step)), run(reference, MODELS["flux"].inputs(step))
        assert all(torch.equal(a, b) for a, b in zip(got, wanted))
    assert not torch.equal(wanted[0], expected()[0])
    for module in (model, reference):
        module.disable_adapters()
    got, wanted = run(model, MODELS["flux"].inputs(3)), run(reference, MODELS["flux"].inputs(3))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))
    model.disable_distributed_layerwise_offload()
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("early", (True, False), ids=("before", "after"))
def test_compiling_blocks_has_no_break_and_no_recompile(early: bool) -> None:
    torch._dynamo.reset()
    model = build("flux", 3)
    inputs = MODELS["flux"].inputs
    if early:
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    handle = apply_distributed_layerwise_offload(model)
    if not early:
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    reference = build("flux", 3)
    run(model, inputs(0))
    run(model, inputs(1))
    torch._dynamo.utils.counters.clear()
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(3):
            got, wanted = run(model, inputs(step)), run(reference, inputs(step))
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, wanted))
    assert not torch._dynamo.utils.counters["graph_break"]
    handle.remove()
    torch._dynamo.reset()


def test_replaced_weights_are_saved_as_they_are_used() -> None:
    model, reference = toy(toys.Stack, 3), toy(toys.Stack, 3)
    handle = apply_distributed_layerwise_offload(model)
    for module in (model, reference):
        module.blocks[1].up.weight = torch.nn.Parameter(torch.full((40, 16), 0.5))
    with torch.no_grad():
        assert torch.equal(model(feed(0)), reference(feed(0)))
    assert all(torch.equal(v, reference.state_dict()[k]) for k, v in model.state_dict().items())
    model.blocks[2].up.weight.data = torch.zeros(8, 16)
    with torch.no_grad(), pytest.raises(RuntimeError, match="'blocks.2.up.weight' was written to"):
        model(feed(0))
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(feed(0)), reference(feed(0)))


def test_a_merged_adapter_is_refused() -> None:
    from peft import LoraConfig

    model = build("flux", 3)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q"], init_lora_weights=False), "one")
    model.fuse_lora()
    with pytest.raises(ValueError, match="adapter merged into its weights.*unload_lora_weights"):
        apply_distributed_layerwise_offload(model)


def test_a_scripted_block_is_refused() -> None:
    model = toy(toys.Stack, 3)
    model.blocks[1] = torch.jit.script(model.blocks[1])
    with pytest.raises(NotImplementedError, match="'blocks.1' of 'model' is a TorchScript module"):
        apply_distributed_layerwise_offload(model)


def test_compiled_helpers_inside_blocks_stay_compiled() -> None:
    """The checks of the first forward may not make dynamo give up on a function that a block calls."""
    torch._dynamo.reset()
    calls = []

    def backend(graph, inputs):
        def run_graph(*args):
            calls.append(1)
            return graph(*args)

        return run_graph

    @torch.compile(backend=backend, fullgraph=True)
    def helper(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2

    model = toy(toys.Stack, 3)
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: output)
        block.forward = lambda x, up=block.up, down=block.down: x + down(helper(up(x)))
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        for _ in range(3):
            model(feed(0))
    handle.remove()
    assert len(calls) == 9
    torch._dynamo.reset()


def test_autocast_keeps_no_copy_of_the_weights() -> None:
    model, reference = toy(toys.Stack, 6), toy(toys.Stack, 6)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for step in range(3):
            assert torch.equal(model(feed(step)), reference(feed(step)))
    handle.remove()
