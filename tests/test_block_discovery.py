# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Which modules are blocks and leaves, and which components of a pipeline stream."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FluxControlNetModel, ModelMixin, UNet2DConditionModel
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from diffusers_dlo import (
    DistributedLayerwiseOffloadConfig,
    apply_distributed_layerwise_offload,
    get_blocks_attr_names,
    get_blocks_from_dit,
    plan_distributed_layerwise_offload,
    set_blocks_attr_names,
)
from diffusers_dlo.block_discovery import Selection, discover_blocks, select_components
from diffusers_dlo.selection import select
from tests import toys, zoo
from tests.toys import Block, toy


# What each class calls in a row, read from its forward; two of each.
BLOCKS = {
    "cosmos3": ["layers.0", "layers.1"],
    "wan": ["blocks.0", "blocks.1"],
    "flux": ["transformer_blocks.0", "transformer_blocks.1", "single_transformer_blocks.0"],
    "sd3": ["transformer_blocks.0", "transformer_blocks.1"],
    "qwenimage": ["transformer_blocks.0", "transformer_blocks.1"],
    "ltx": ["transformer_blocks.0", "transformer_blocks.1"],
    "hunyuanvideo": [
        "context_embedder.token_refiner.refiner_blocks.0",  # as large as a block here; smaller in real checkpoints
        "transformer_blocks.0",
        "transformer_blocks.1",
        "single_transformer_blocks.0",
    ],
    "cogvideox": ["transformer_blocks.0", "transformer_blocks.1"],
    "minimaxh3": ["token_refiner.refiner_blocks.0", "transformer_blocks.0", "transformer_blocks.1"],
    "t5": ["encoder.block.0", "encoder.block.1"],
    "clip": ["encoder.layers.0", "encoder.layers.1"],
    "qwen2_5_vl": [
        "model.visual.blocks.0",
        "model.visual.blocks.1",
        "model.language_model.layers.0",
        "model.language_model.layers.1",
    ],
}


def nbytes(module: nn.Module) -> int:
    """Bytes of a module's state; the toys and models here have no other buffers that matter."""
    return sum(t.nbytes for t in module.parameters()) + sum(t.nbytes for t in module.buffers())


def names_of(model: nn.Module, names: Sequence[str] | None = None) -> list[str]:
    """The names of the blocks found, each checked against the module it names."""
    blocks = discover_blocks(model, names).blocks
    assert all(model.get_submodule(name) is module for name, module in blocks.items())
    assert not any(isinstance(module, nn.ModuleList) for module in blocks.values())
    return list(blocks)


class Mixed(nn.Module):
    """Repeated `Block`s, and a list of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.layers = nn.ModuleList(Block(16, 24) for _ in range(2))
        self.head = Block(16, 8)


class Repeats(Mixed):
    _repeated_blocks = ["Block"]


class Unsplittable(Mixed):
    _no_split_modules = ["Block"]


class Outdated(Mixed):
    _repeated_blocks = ["BlockOfAnEarlierVersion"]
    _no_split_modules = None


class Wrapper(nn.Module):
    """As a text encoder around its decoder: the class data is the inner model's."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.model = Repeats()


class Chained(nn.Module):
    """As ConsisID: members of a list are lists of layers, and it is the layers that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(16, 16), nn.ModuleList([Block(16, 8)]), nn.GELU()]) for _ in range(2)
        )


class Stage(nn.Module):
    """As in a UNet: a list of attentions, each with a list of blocks, and a list of other layers beside it."""

    def __init__(self, width: int, own: int = 0) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.resnets = nn.ModuleList(Resnet(16, width) for _ in range(2))
        self.own = nn.Linear(16, own) if own else None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(16, 24)])


class Resnet(Block):
    """Of another class than a block."""


class Plain(nn.Module):
    """A stage without blocks, only other layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(Resnet(16, width) for _ in range(2))


class Net(nn.Module):
    """A UNet that declares its blocks alone."""

    _repeated_blocks = ["Block"]

    def __init__(self, own: int = 0) -> None:
        super().__init__()
        self.downs = nn.ModuleList([Stage(24, own), Plain(32)])
        self.tiny = nn.ModuleList([nn.Linear(16, 4)])


class StageNet(Net):
    """One that declares its stages too."""

    _no_split_modules = ["Block", "Resnet", "Stage"]


class Model(ModelMixin):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(16, 24) for _ in range(2))


class Several(nn.Module):
    """As a multi-ControlNet: a list of models."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(Model() for _ in range(2))


# ----------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_real_models(name: str) -> None:
    model = zoo.build(name)
    assert names_of(model) == BLOCKS[name]
    lists, blocks = get_blocks_from_dit(model)
    assert lists == list(dict.fromkeys(block.rpartition(".")[0] for block in BLOCKS[name]))
    assert [id(block) for block in blocks] == [id(model.get_submodule(block)) for block in BLOCKS[name]]


def test_every_real_model_is_covered() -> None:
    assert BLOCKS.keys() == zoo.MODELS.keys() | zoo.TEXT_ENCODERS.keys()


def test_one_block_is_enough() -> None:
    assert names_of(zoo.build("wan", 1)) == ["blocks.0"]


def test_class_data_decides_and_any_list_is_the_fallback() -> None:
    everything = ["adapters.0", "adapters.1", "layers.0", "layers.1"]
    assert names_of(Repeats()) == names_of(Unsplittable()) == ["layers.0", "layers.1"]
    assert names_of(Mixed()) == everything
    assert names_of(Outdated()) == everything, "class data that matches nothing is as good as none"


def test_class_data_of_a_model_inside() -> None:
    assert names_of(Wrapper()) == ["model.layers.0", "model.layers.1"]


def test_a_meta_model_will_do() -> None:
    with torch.device("meta"):
        model = toys.Nested()
    assert names_of(model) == names_of(toy(toys.Nested))


def test_nested_lists_and_blocks() -> None:
    assert names_of(toy(toys.Nested)) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "outers.0"]


def test_a_list_that_is_a_member_gives_its_members() -> None:
    expected = ["layers.0.0", "layers.0.1.0", "layers.1.0", "layers.1.1.0"]
    assert names_of(Chained()) == names_of(Chained(), ["layers"]) == expected
    assert names_of(Chained(), ["layers.1"]) == expected[2:]


def test_the_outermost_is_the_block_also_where_the_inner_one_is_declared_first() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = Block(16, 8)
            self.first = nn.ModuleList([shared])  # registered before the block that also holds it
            holder = Block(16, 24)
            holder.inner = shared
            self.second = nn.ModuleList([holder])

    assert names_of(Outer()) == ["second.0"]


ATTENTIONS = ["downs.0.attentions.0.blocks.0", "downs.0.attentions.1.blocks.0"]
RESNETS = ["downs.0.resnets.0", "downs.0.resnets.1"]
PLAIN = ["downs.1.resnets.0", "downs.1.resnets.1"]


def test_members_beside_the_declared_ones_stream_if_they_are_as_large() -> None:
    """A slot holds what is declared; of the rest, a stage that needs a larger one gives its layers."""
    assert nbytes(Net().downs[1]) > nbytes(Block(16, 24)) <= nbytes(Resnet(16, 24))
    assert sorted(names_of(Net())) == sorted([*ATTENTIONS, *RESNETS, *PLAIN])
    small = Net()
    small.downs[0] = Stage(16)
    assert nbytes(Resnet(16, 16)) < nbytes(Block(16, 24))
    assert sorted(names_of(small)) == sorted([*ATTENTIONS, *PLAIN])
    small.downs[1] = Plain(16)
    assert nbytes(small.downs[1]) > nbytes(Block(16, 24)), "a slot for it would be larger"
    assert sorted(names_of(small)) == sorted([*ATTENTIONS, *PLAIN])
    small.downs[1] = Plain(11)
    assert nbytes(small.downs[1]) <= nbytes(Block(16, 24))
    assert sorted(names_of(small)) == ATTENTIONS
    small.downs[0].attentions[1].blocks[0] = Block(16, 20)
    assert sorted(names_of(small)) == sorted([*ATTENTIONS, "downs.1"])


def test_a_declared_stage_that_consists_of_blocks_is_none() -> None:
    assert sorted(names_of(StageNet())) == sorted([*ATTENTIONS, *RESNETS, *PLAIN])
    inner = sum(nbytes(Block(16, 24)) for _ in range(4))
    own = inner // nbytes(nn.Linear(16, 1))
    assert sorted(names_of(StageNet(own + 1))) == sorted(["downs.0", *PLAIN]), "most of it is its own"


def test_blocks_of_all_kinds_are_in_order_of_registration() -> None:
    model = Net()
    order = [name for name, _ in model.named_modules()]
    lists = {name: order.index(name.rpartition(".")[0]) for name in names_of(model)}
    assert list(lists.values()) == sorted(lists.values()) and len(set(lists.values())) == 4


def test_models_in_a_list_are_no_blocks() -> None:
    inside = [f"nets.{net}.layers.{layer}" for net in range(2) for layer in range(2)]
    assert names_of(Several()) == inside
    assert names_of(Several(), ["nets"]) == ["nets.0", "nets.1"], "who names the list wants it"


class WithEncoder(Repeats):
    """As Wan-Animate: an encoder in the model has layers that are unsplittable, and not what the model repeats."""

    _no_split_modules = ["Block", "Linear"]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(16, width) for _ in range(3))


def test_small_layers_that_are_not_repeated_stay() -> None:
    block, layers = ["layers.0", "layers.1"], ["adapters.0", "adapters.1"]
    encoder = ["encoder.0", "encoder.1", "encoder.2"]
    sizes = [nbytes(Block(16, 24)), 2 * nbytes(nn.Linear(16, 16))]
    assert sizes[1] + 3 * nbytes(nn.Linear(16, 5)) < sizes[0] <= sizes[1] + 3 * nbytes(nn.Linear(16, 6))
    assert names_of(WithEncoder(5)) == block
    assert names_of(WithEncoder(6)) == [*layers, *block, *encoder]
    assert names_of(WithEncoder(5), ["encoder", "layers"]) == [*encoder, *block], "who names the list wants it"


class ByKey(Repeats):
    """Layers between those of the list, in a dictionary that has some of their numbers; another is of embedders."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.ModuleDict({"1": Block(16, 8), "3": Block(16, 40)})
        self.embedders = nn.ModuleDict({"text": nn.Linear(16, 16)})


def test_members_of_a_dictionary_stream_where_their_class_is_declared() -> None:
    assert names_of(ByKey()) == ["layers.0", "layers.1", "between.1", "between.3"]
    assert names_of(ByKey(), ["embedders", "between"]) == ["embedders.text", "between.1", "between.3"]
    model = Mixed()
    model.by_key = nn.ModuleDict({"a": Block(16, 8)})
    assert names_of(model) == ["adapters.0", "adapters.1", "layers.0", "layers.1"], "nothing is declared"


def test_a_dictionary_in_a_list_is_no_block() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"attn": Block(16, 8), "ff": nn.Linear(16, 16)}) for _ in range(2))
    assert names_of(model) == ["layers.0.attn", "layers.0.ff", "layers.1.attn", "layers.1.ff"]


def test_a_repeated_module_is_one_block() -> None:
    model = toy(toys.Repeated)
    assert names_of(model) == ["blocks.0", "blocks.1"]
    model.again = model.blocks
    model.others = nn.ModuleList([model.blocks[1], Block(16, 8), model.blocks[0]])
    assert names_of(model) == ["blocks.0", "blocks.1", "others.1"]


def test_members_without_weights_are_no_blocks() -> None:
    model = toy(toys.Stack, 2)
    model.blocks.insert(1, nn.Sequential(nn.GELU(), nn.Dropout()))
    assert names_of(model) == names_of(model, ["blocks"]) == ["blocks.0", "blocks.2"]


# ------------------------------------------------------------------------------------------------------ names


def test_names_win_over_class_data() -> None:
    model = Repeats()
    assert names_of(model, ["adapters"]) == ["adapters.0", "adapters.1"]
    assert names_of(model, ("layers", "adapters"))[::2] == ["layers.0", "adapters.0"]
    flux = zoo.build("flux")
    assert names_of(flux, ["single_transformer_blocks"]) == ["single_transformer_blocks.0"]
    # A list inside a block can be named as well as any other, and where both are, the outer one counts.
    assert names_of(flux, ["transformer_blocks.1.ff.net"]) == [
        "transformer_blocks.1.ff.net.0",
        "transformer_blocks.1.ff.net.2",
    ]
    both = names_of(flux, ["transformer_blocks.1.ff.net", "transformer_blocks"])
    assert both == ["transformer_blocks.0", "transformer_blocks.1"]


@pytest.mark.parametrize("name", ("layer", "layers.0", "head", ""))
def test_a_wrong_name_lists_what_there_is(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        discover_blocks(Repeats(), ["layers", name])
    assert str(caught.value) == f"'{name}' is not a ModuleList of 'Repeats'; it has: adapters, layers."
    with pytest.raises(ValueError, match="'layers' is not a ModuleList of 'Linear'; it has: none"):
        discover_blocks(nn.Linear(2, 2), ["layers"])


def test_no_blocks() -> None:
    with pytest.raises(ValueError, match=r"No blocks found in 'Linear': it has no ModuleList.*blocks=.*components="):
        discover_blocks(nn.Linear(2, 2))
    model = nn.Module()
    model.acts = nn.ModuleList([nn.GELU()])
    model.empty = nn.ModuleList()
    for names in (None, ["acts"], ["empty"]):
        with pytest.raises(ValueError, match="No blocks found in 'Module': it has the ModuleLists acts, empty"):
            discover_blocks(model, names)


@pytest.fixture
def classes() -> Iterator[tuple[type, type]]:
    class Base(Mixed):
        pass

    class Derived(Base):
        pass

    yield Base, Derived


def test_names_set_for_a_class(classes: tuple[type, type]) -> None:
    base, derived = classes
    assert get_blocks_attr_names(base) == get_blocks_attr_names(derived()) == []
    set_blocks_attr_names(base, ["adapters"])
    assert get_blocks_attr_names(base()) == get_blocks_attr_names(derived) == ["adapters"]
    assert get_blocks_attr_names(Mixed) == [], "the class it derives from is another class"
    assert names_of(derived()) == ["adapters.0", "adapters.1"]
    assert names_of(derived(), ["layers"]) == ["layers.0", "layers.1"], "the option wins over the class"

    set_blocks_attr_names(derived(), ("layers",))
    assert get_blocks_attr_names(derived) == ["layers"] and get_blocks_attr_names(base) == ["adapters"]
    assert get_blocks_from_dit(derived())[0] == ["layers"] and get_blocks_from_dit(base())[0] == ["adapters"]
    set_blocks_attr_names(derived, None)
    assert get_blocks_attr_names(derived) == ["adapters"]
    set_blocks_attr_names(derived, None)  # nothing of its own: no error, and the base keeps its setting
    assert get_blocks_attr_names(base) == ["adapters"]
    set_blocks_attr_names(base, None)
    assert get_blocks_attr_names(derived) == [] and names_of(derived()) == names_of(Mixed())


def test_names_set_for_a_class_are_a_copy(classes: tuple[type, type]) -> None:
    names = ["adapters"]
    set_blocks_attr_names(classes[0], names)
    names.append("layers")
    get_blocks_attr_names(classes[0]).append("layers")
    assert get_blocks_attr_names(classes[0]) == ["adapters"]


@pytest.mark.parametrize("names", ("layers", [], [1], ()))
def test_wrong_names_for_a_class(classes: tuple[type, type], names: Any) -> None:
    with pytest.raises(TypeError, match="'Base' must be a list of ModuleList names"):
        set_blocks_attr_names(classes[0], names)
    assert get_blocks_attr_names(classes[0]) == []


def test_a_wrong_name_set_for_a_class_lists_what_there_is(classes: tuple[type, type]) -> None:
    set_blocks_attr_names(classes[0], ["layerz"])
    with pytest.raises(ValueError, match="'layerz' is not a ModuleList of 'Base'; it has: adapters, layers"):
        discover_blocks(classes[0]())


# ----------------------------------------------------------------------------------------------------- leaves


def test_large_embeddings_and_linears_are_leaves() -> None:
    model = toy(toys.Leafy)
    leaves = discover_blocks(model).leaves
    assert list(leaves) == ["embed", "lm_head"]
    assert leaves["embed"] is model.embed and leaves["lm_head"] is model.lm_head


def test_as_large_as_the_largest_block_is_large() -> None:
    def leaves(**extra: nn.Module) -> list[str]:
        model = toy(toys.Stack, 3)
        largest = max(nbytes(block) for block in model.blocks)
        assert largest == nbytes(model.blocks[1])
        for name, module in extra.items():
            setattr(model, name, module)
        return list(discover_blocks(model).leaves)

    size = nbytes(toy(toys.Stack, 3).blocks[1]) // 4
    equal = nn.Linear(size - 1, 1)  # with its bias as many elements as the block
    assert nbytes(equal) == 4 * size
    assert leaves(equal=equal, below=nn.Linear(size - 2, 1), above=nn.Linear(size, 1)) == ["equal", "above"]
    # Only what can be fetched when it is called; a convolution or a bare parameter cannot be told to be rarely used.
    assert leaves(conv=nn.Conv1d(size, 4, 1), norm=nn.LayerNorm(size)) == []
    assert leaves(nested=nn.Sequential(nn.GELU(), nn.Embedding(size, 1))) == ["nested.1"]


def test_a_linear_in_a_block_is_no_leaf() -> None:
    model = toy(toys.Stack, 2)
    model.blocks[0].wide = nn.Linear(16, 2000)
    model.blocks[1].wide = model.blocks[0].wide
    assert discover_blocks(model).leaves == {}
    # Nor is one that is a whole block, or all that a block has.
    model.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16)), nn.Embedding(17, 16)])
    assert list(discover_blocks(model).leaves) == ["inp", "out"], "those outside are as large as the largest block"


def test_tied_leaves_are_one_that_is_fetched_once() -> None:
    """A vocabulary under two names, as T5's `shared` and `encoder.embed_tokens`."""
    model, reference = toy(toys.Leafy), toy(toys.Leafy)
    for module in (model, reference):
        module.lm_head.weight = module.embed.weight
    plan = plan_distributed_layerwise_offload(model).components[0]
    assert [[t.name for t in leaf.tensors] for leaf in plan.leaves] == [["embed.weight", "lm_head.bias"]]
    assert plan.placed_nbytes == nbytes(model.inp) + nbytes(model.out)
    handle = apply_distributed_layerwise_offload(model)
    with torch.no_grad():
        assert torch.equal(model(toys.feed(0)), reference(toys.feed(0)))
        assert torch.equal(model.lm_head(toys.feed(1)), reference.lm_head(toys.feed(1)))
        assert torch.equal(model(toys.feed(2)), reference(toys.feed(2)))
    handle.remove()
    assert model.lm_head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, reference.embed.weight)


def test_a_leaf_that_shares_with_another_kind_of_module_stays() -> None:
    model = toy(toys.Leafy)
    model.also = nn.ParameterList([model.embed.weight])
    plan = plan_distributed_layerwise_offload(model).components[0]
    assert [leaf.name for leaf in plan.leaves] == ["lm_head"]
    assert plan.placed_nbytes == nbytes(model.inp) + nbytes(model.out) + 400 * 16 * 4


# ------------------------------------------------------------------------------------- components of a pipeline


class Pipe:
    """What a pipeline is to the selection: an object with a mapping of components."""

    def __init__(self, **components: object) -> None:
        self.components: Mapping[str, object] = components


class ListFree(PreTrainedModel):
    """A text encoder without lists, larger than anything here."""

    config_class = PretrainedConfig

    def __init__(self) -> None:
        super().__init__(PretrainedConfig())
        self.embed = nn.Embedding(4000, 64)


def chosen(selection: Selection) -> tuple[list[str], set[str], list[str]]:
    """The names: streamed, encoders among them, placed."""
    return list(selection.streamed), set(selection.encoders), list(selection.placed)


def vae() -> AutoencoderKL:
    """Larger than the transformers' blocks, and with lists of its own."""
    torch.manual_seed(0)
    return AutoencoderKL(block_out_channels=(32,), norm_num_groups=4, layers_per_block=2, latent_channels=4)


def test_an_encoder_streams_if_it_is_larger_than_the_largest_block() -> None:
    flux = zoo.build("flux")
    largest = max(nbytes(block) for block in flux.transformer_blocks)
    small, large = zoo.build("t5", 2), zoo.build("t5", 4)
    assert nbytes(small) < largest < nbytes(large) and nbytes(vae()) > largest
    modules = {"text_encoder": small, "vae": vae(), "transformer": flux, "text_encoder_2": large}
    selection = select_components(modules)
    assert chosen(selection) == (["transformer", "text_encoder_2"], {"text_encoder_2"}, ["text_encoder", "vae"])
    assert all(modules[name] is module for name, module in {**selection.streamed, **selection.placed}.items())


def test_an_encoder_as_large_as_the_largest_block_is_placed() -> None:
    encoder = zoo.build("clip")
    transformer = toy(toys.Stack, 1)
    transformer.blocks[0] = nn.Linear(nbytes(encoder) // 4, 1, bias=False)
    assert chosen(select_components({"transformer": transformer, "text_encoder": encoder}))[0] == ["transformer"]
    transformer.blocks[0] = nn.Linear(nbytes(encoder) // 4 - 1, 1, bias=False)
    both = ["transformer", "text_encoder"]
    assert chosen(select_components({"transformer": transformer, "text_encoder": encoder}))[0] == both


def test_the_largest_block_of_all_transformers_counts() -> None:
    modules = {"transformer": zoo.build("wan"), "transformer_2": zoo.build("flux"), "text_encoder": zoo.build("t5")}
    assert nbytes(modules["transformer"].blocks[0]) < nbytes(modules["text_encoder"])
    assert chosen(select_components(modules)) == (["transformer", "transformer_2"], set(), ["text_encoder"])


def test_denoisers_are_known_by_class_or_by_name() -> None:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(8, 8),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=8,
        norm_num_groups=4,
    )
    controlnet = FluxControlNetModel(
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        in_channels=16,
        joint_attention_dim=24,
        pooled_projection_dim=20,
        axes_dims_rope=(4, 6, 6),
    )
    modules = {
        "vae": vae(),
        "denoiser": unet,
        "controlnet": controlnet,
        "prior": zoo.build("sd3", 1),
        "transformer_own": toy(toys.Stack, 2),
        "other": toy(toys.Stack, 2),
    }
    expected = ["denoiser", "controlnet", "prior", "transformer_own"]
    assert chosen(select_components(modules)) == (expected, set(), ["vae", "other"])


def test_an_encoder_without_blocks_is_placed() -> None:
    modules = {"transformer": zoo.build("wan"), "text_encoder": ListFree()}
    assert nbytes(modules["text_encoder"]) > nbytes(modules["transformer"])
    assert chosen(select_components(modules)) == (["transformer"], set(), ["text_encoder"])


def test_names_choose() -> None:
    modules = {
        "text_encoder": zoo.build("t5", 4),
        "transformer": zoo.build("wan"),
        "transformer_2": zoo.build("wan"),
        "vae": vae(),
    }
    assert chosen(select_components(modules, ["transformer_2"])) == (
        ["transformer_2"],
        set(),
        ["text_encoder", "transformer", "vae"],
    ), "an encoder that nobody named does not stream, however large"
    assert chosen(select_components(modules, ("transformer", "text_encoder"))) == (
        ["transformer", "text_encoder"],
        {"text_encoder"},
        ["transformer_2", "vae"],
    )
    assert chosen(select_components(modules, ["vae"]))[0] == ["vae"], "any component with lists can be named"


def test_wrong_names_of_components() -> None:
    modules = {"transformer": zoo.build("wan"), "text_encoder": ListFree()}
    with pytest.raises(ValueError) as caught:
        select_components(modules, ["transformer", "transformer_2"])
    text = "'transformer_2' is not a component with weights; this pipeline has: transformer, text_encoder."
    assert str(caught.value) == text
    for names in ("transformer", [], ()):
        with pytest.raises(ValueError, match="'components' must be a list of component names"):
            select_components(modules, names)
    with pytest.raises(ValueError, match="No blocks found in 'ListFree'"):
        select_components(modules, ["text_encoder"])


def test_a_pipeline_without_a_transformer() -> None:
    with pytest.raises(
        ValueError, match="no transformer to stream; its components are: vae, text_encoder.*components="
    ):
        select_components({"vae": vae(), "text_encoder": zoo.build("t5")})
    with pytest.raises(ValueError, match="its components are: none"):
        select_components({})


def test_the_same_module_under_two_names_counts_once() -> None:
    transformer, encoder = zoo.build("wan"), zoo.build("t5")
    modules = {"transformer": transformer, "text_encoder": encoder, "transformer_2": transformer, "again": encoder}
    assert chosen(select_components(modules)) == (["transformer", "text_encoder"], {"text_encoder"}, [])
    # Named by its second name, it is neither left out nor placed under the first.
    assert chosen(select_components(modules, ["transformer_2"])) == (["transformer_2"], set(), ["text_encoder"])


def test_the_same_module_under_two_names_that_are_both_asked_for_counts_once() -> None:
    transformer = zoo.build("wan")
    selection = select_components(
        {"transformer": transformer, "transformer_2": transformer}, ["transformer", "transformer_2"]
    )
    assert chosen(selection) == (["transformer"], set(), [])


def test_blocks_chosen_by_hand_count_when_encoders_are_compared() -> None:
    flux, encoder = zoo.build("flux"), zoo.build("t5")
    single = nbytes(flux.single_transformer_blocks[0])
    assert single < nbytes(encoder) < nbytes(flux.transformer_blocks[0])
    pipe = Pipe(transformer=flux, text_encoder=encoder)
    assert chosen(select(pipe, DistributedLayerwiseOffloadConfig(), None))[0] == ["transformer"]
    config = DistributedLayerwiseOffloadConfig(blocks={"transformer": ["single_transformer_blocks"]})
    assert chosen(select(pipe, config, None))[0] == ["transformer", "text_encoder"]
    plan = plan_distributed_layerwise_offload(pipe, config)
    assert [block.name for block in plan.blocks] == [
        "single_transformer_blocks.0",
        "encoder.block.0",
        "encoder.block.1",
    ]


def test_what_a_pipeline_holds_besides_modules_is_left_out() -> None:
    wan = zoo.build("wan")
    pipe = Pipe(tokenizer="words", text_encoder=None, transformer=torch.compile(wan), scheduler=object(), vae=vae())
    selection = select(pipe, DistributedLayerwiseOffloadConfig(), None)
    assert chosen(selection) == (["transformer"], set(), ["vae"])
    assert selection.streamed["transformer"] is wan, "compiled modules are unwrapped"
    with pytest.raises(ValueError, match="'tokenizer' is not a component with weights.*transformer, vae"):
        select(pipe, DistributedLayerwiseOffloadConfig(), ["tokenizer"])


def test_a_single_module_is_one_component() -> None:
    wan = zoo.build("wan")
    assert select(wan, DistributedLayerwiseOffloadConfig(), None) == Selection({"model": wan}, frozenset(), {})
    assert select(torch.compile(wan), DistributedLayerwiseOffloadConfig(), None).streamed["model"] is wan
    with pytest.raises(ValueError, match="'components' belongs to a pipeline"):
        select(wan, DistributedLayerwiseOffloadConfig(), ["model"])
    for wrong in ("wan", None, {"transformer": wan}, type(wan)):
        with pytest.raises(TypeError, match="torch.nn.Module or a DiffusionPipeline"):
            select(wrong, DistributedLayerwiseOffloadConfig(), None)
