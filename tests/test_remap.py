# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Meta models filled from safetensors through `_remap_ckpt_key`: bits, mappings, and every way in which it is refused.
"""

import json
import os
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel, WanTransformer3DModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import T5EncoderModel

from diffusers_dlo import supports_mmap_loading
from diffusers_dlo.casts import cast, flat_bytes, pending_casts, set_pending_casts
from diffusers_dlo.checkpoint.mapped import locate_tensors
from diffusers_dlo.checkpoint.remap import load_mapped_checkpoint
from tests import toys, zoo


PREFIX = "model.diffusion_model."
DTYPES = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32]
DTYPES += [torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
"""All that safetensors writes of at least a byte an element."""


class Wan(WanTransformer3DModel):
    """Wan as others publish it: under a prefix, with other names of its blocks, beside a model of another kind."""

    @staticmethod
    def _remap_ckpt_key(key: str) -> str | None:
        if key.startswith("vae."):
            return None
        return key.removeprefix(PREFIX).replace("layers.", "blocks.")


class Stack(toys.Stack):
    def _remap_ckpt_key(self, key: str) -> str | None:
        assert self.blocks is not None  # an instance method may look at the model
        return key.removeprefix(PREFIX)


class Tied(toys.Tied):
    @classmethod
    def _remap_ckpt_key(cls, key: str) -> str | None:
        return key


class Shared(Stack):
    """A module under two names."""

    def __init__(self) -> None:
        super().__init__(2)
        self.again = self.blocks[0]


def wan() -> WanTransformer3DModel:
    """The reference, with weights."""
    torch.manual_seed(0)
    return zoo.MODELS["wan"].build(2)


def empty(cls: type[nn.Module] = Wan, *args: Any) -> nn.Module:
    """A model on the meta device, with buffers, as `from_pretrained` builds it."""
    with init_empty_weights():
        return cls.from_config(dict(wan().config)) if cls is Wan else cls(*args)


def published(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a Wan under the keys that `Wan._remap_ckpt_key` takes apart, and more that it leaves out."""
    state = {PREFIX + name.replace("blocks.", "layers."): t.clone() for name, t in model.state_dict().items()}
    return {**state, "vae.weight": torch.ones(3)}


def shard(folder: Path, state: Mapping[str, torch.Tensor], name: str = "diffusion_pytorch_model") -> Path:
    """Saves a checkpoint in three files with an index, and returns the index."""
    weight_map = {}
    for index in range(3):
        part = {key: state[key] for key in list(state)[index::3]}
        file = f"{name}-{index + 1:05}-of-00003.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    path = folder / f"{name}.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_filled(model: nn.Module, reference: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Every tensor of the state has the reference's bits and is a view of a file in `folder` that holds them."""
    state = {name: tensor for name, tensor in tensors_of(model).items() if name in reference}
    assert state and set(state) == {name for name in reference if name in state}
    located = locate_tensors(state.values())
    assert not located.reasons
    for name, tensor in state.items():
        assert tensor.is_contiguous() and not tensor.is_inference()
        assert tensor.dtype == reference[name].dtype and tensor.shape == reference[name].shape
        assert torch.equal(flat_bytes(tensor), flat_bytes(reference[name].contiguous())), name
        where = located.ranges[id(tensor)]
        assert Path(where.path).parent == folder.resolve()
        with open(where.path, "rb") as file:
            file.seek(where.offset)
            assert file.read(where.nbytes) == bytes(flat_bytes(tensor).tolist())


def open_files(folder: Path) -> list[str]:
    """What of `folder` this process has mapped or open."""
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += [target for target in [os.readlink(f"/proc/self/fd/{fd}")] if str(folder) in target]
        except FileNotFoundError:
            pass
    return found


def refused(model: nn.Module, path: Path, error: type[Exception], *texts: str) -> str:
    """Filling raises just this, says all of `texts`, leaves the model alone and keeps no file."""
    before = {name: (tensor, tensor.is_meta, dict(vars(tensor))) for name, tensor in tensors_of(model).items()}
    folder = path if path.is_dir() else path.parent
    with pytest.raises(error) as raised:
        load_mapped_checkpoint(model, path)
    # While the traceback lives, with all that its frames hold.
    assert open_files(folder) == []
    assert type(raised.value) is error
    for text in texts:
        assert text in str(raised.value)
    after = tensors_of(model)
    assert list(after) == list(before)
    for name, (tensor, is_meta, attributes) in before.items():
        assert after[name] is tensor and tensor.is_meta == is_meta and vars(tensor) == attributes
    return str(raised.value)


# --------------------------------------------------------------------------------------------------------- what works


def one_file(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def only_file(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    return one_file(folder, state).parent


def index(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    return shard(folder, state)


def indexed_folder(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    shard(folder, state)
    save_file({"a": torch.ones(1)}, folder / "diffusion_pytorch_model.safetensors")
    shard(folder, {"a": torch.ones(1)}, "model")
    return folder


def folder_of_another_name(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    return shard(folder, state, "diffusion_pytorch_model.fp16").parent


def hub_cache(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    """Files of the Hub's cache are links that lead out of their folder."""
    (folder / "snapshot").mkdir()
    for number, file in enumerate(sorted(shard(folder, state).parent.glob("*.*"))):
        file.rename(folder / f"blob{number}")
        (folder / "snapshot" / file.name).symlink_to(f"../blob{number}")
    return folder / "snapshot"


@pytest.mark.parametrize(
    "save", [one_file, only_file, index, indexed_folder, folder_of_another_name, hub_cache], ids=lambda f: f.__name__
)
def test_filled_with_the_files_own_bytes(save: Callable[[Path, dict], Path], tmp_path: Path) -> None:
    reference = wan()
    path = save(tmp_path, published(reference))
    model = empty()
    buffers = {name: (tensor, tensor.clone()) for name, tensor in model.named_buffers()}
    assert buffers
    assert load_mapped_checkpoint(model, path) is model
    assert_filled(model, reference.state_dict(), tmp_path)
    assert all(not pending_casts(p) and p.requires_grad and type(p) is nn.Parameter for p in model.parameters())
    for name, tensor in model.named_buffers():
        assert tensor is buffers[name][0] and torch.equal(tensor, buffers[name][1])
    # Views are aligned as in the file, which changes the last bit of what the CPU computes: compare from copies.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    model.eval()
    inputs = zoo.MODELS["wan"].inputs(0)
    for mine, theirs in zip(zoo.run(model, inputs), zoo.run(reference, inputs), strict=True):
        assert torch.equal(mine, theirs)
    assert open_files(tmp_path) == []  # nothing but the views kept the files


def test_a_path_may_be_a_string_and_the_mode_stays(tmp_path: Path) -> None:
    path = one_file(tmp_path, published(wan()))
    for training in (True, False):
        model = empty().train(training)
        load_mapped_checkpoint(model, str(path))
        assert model.training == training


def test_a_compiled_model_is_filled_inside(tmp_path: Path) -> None:
    reference = wan()
    compiled = torch.compile(empty(), backend="eager")
    assert load_mapped_checkpoint(compiled, one_file(tmp_path, published(reference))) is compiled
    assert_filled(compiled._orig_mod, reference.state_dict(), tmp_path)


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.device("meta"), init_empty_weights])
def test_contexts_do_not_change_what_views_are(context: Callable[[], Any], tmp_path: Path) -> None:
    reference, model = wan(), empty()
    path = one_file(tmp_path, published(reference))
    with context():
        load_mapped_checkpoint(model, path)
    assert_filled(model, reference.state_dict(), tmp_path)


def test_the_files_dtype_is_kept_and_the_models_is_pending(tmp_path: Path) -> None:
    reference = wan().to(torch.bfloat16)
    model = empty()
    next(model.parameters()).mark = "kept"
    fp32 = {name for name, parameter in model.named_parameters() if "norm" in name}
    for name, parameter in list(model.named_parameters()):
        if name not in fp32:
            module, _, attribute = name.rpartition(".")
            half = nn.Parameter(parameter.to(torch.bfloat16), requires_grad=False)
            setattr(model.get_submodule(module), attribute, half)
            vars(half).update(vars(parameter))
    load_mapped_checkpoint(model, one_file(tmp_path, published(reference)))
    assert_filled(model, reference.state_dict(), tmp_path)
    assert fp32 and next(model.parameters()).mark == "kept"
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in fp32)
        assert pending_casts(parameter) == ((torch.float32,) if name in fp32 else ())
        assert torch.equal(cast(parameter), reference.get_parameter(name).to(cast(parameter).dtype))


def test_a_pending_cast_of_before_counts_as_the_models_dtype(tmp_path: Path) -> None:
    state = {name: tensor.to(torch.bfloat16) for name, tensor in published(wan()).items()}
    model = empty()
    first, second, *_ = model.parameters()
    set_pending_casts(first, (torch.float16, torch.bfloat16))
    set_pending_casts(second, (torch.bfloat16, torch.float16))
    load_mapped_checkpoint(model, one_file(tmp_path, state))
    first, second, third, *_ = model.parameters()
    assert [pending_casts(p) for p in (first, second, third)] == [(), (torch.float16,), (torch.float32,)]


def test_buffers_of_every_dtype_and_real_tensors_are_replaced(tmp_path: Path) -> None:
    reference = toys.toy(toys.Stack, 2, toys.MixedBlock, seed=1)
    model = empty(Stack, 2, toys.MixedBlock)
    block = model.blocks[0]
    assert not block.shift.is_meta  # real, and replaced all the same
    block.norm.weight = nn.Parameter(torch.zeros(16), requires_grad=False)
    block.register_buffer("mask", block.mask.to("meta"))
    table = block.table
    state = {PREFIX + name: tensor.clone().contiguous() for name, tensor in reference.state_dict().items()}
    load_mapped_checkpoint(model, one_file(tmp_path, state))
    assert_filled(model, reference.state_dict(), tmp_path)
    assert block.table is table
    assert isinstance(block.norm.weight, nn.Parameter) and not block.norm.weight.requires_grad
    assert type(block.mask) is torch.Tensor and set(block._buffers) == {"shift", "mask", "table"}


@pytest.mark.parametrize("kept", ["first name", "second name", "both names"])
def test_tied_parameters_need_one_name_and_stay_tied(kept: str, tmp_path: Path) -> None:
    reference = toys.toy(toys.Tied, seed=2)
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    for first, second in (
        ("blocks.0.up.weight", "blocks.1.up.weight"),
        ("blocks.2.down.weight", "out.weight"),
        ("blocks.0.norm.bias", "blocks.0.down.bias"),
    ):
        if kept != "both names":
            del state[second if kept == "first name" else first]
    with torch.device("meta"):
        model = Tied()
    load_mapped_checkpoint(model, one_file(tmp_path, state))
    assert_filled(model, reference.state_dict(), tmp_path)
    assert model.blocks[0].up.weight is model.blocks[1].up.weight
    assert model.blocks[2].down.weight is model.out.weight
    assert model.blocks[0].down.bias is model.blocks[0].norm.bias


def test_a_module_under_two_names_is_found_by_either(tmp_path: Path) -> None:
    reference = toys.toy(Shared, seed=3)
    state = {name: t.clone() for name, t in reference.state_dict().items() if not name.startswith("blocks.0.")}
    model = empty(Shared)
    load_mapped_checkpoint(model, one_file(tmp_path, state))
    assert_filled(model, reference.state_dict(), tmp_path)
    assert model.again is model.blocks[0]


def hand_made(path: Path, header: Any, nbytes: int, *, raw: bytes | None = None, length: int | None = None) -> Path:
    """A file with this header, true or not, and `nbytes` bytes after it, which are a hole on the disk."""
    text = raw if raw is not None else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text) if length is None else length) + text)
        file.truncate(8 + len(text) + nbytes)
    return path


def entry(start: int, stop: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_thousands_of_keys_and_gigabytes_are_a_matter_of_metadata(tmp_path: Path) -> None:
    """4 GiB in 4096 tensors: nothing of it is read, so it may be a hole on the disk."""
    count, nbytes = 4096, 1 << 20

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList(
                nn.Parameter(torch.empty(512, 1024, dtype=torch.bfloat16, device="meta")) for _ in range(count)
            )

        _remap_ckpt_key = staticmethod(lambda key: f"rows.{key}")

    header = {str(i): entry(i * nbytes, (i + 1) * nbytes, (512, 1024), "BF16") for i in range(count)}
    path = hand_made(tmp_path / "many.safetensors", header, count * nbytes)
    model = Many()
    start = time.monotonic()
    load_mapped_checkpoint(model, path)
    assert time.monotonic() - start < 5  # 0.4 s where nothing else runs
    mappings = [m for m in Path("/proc/self/smaps").read_text().split("VmFlags") if str(path) in m]
    assert sum(int(m.partition("\nSize:")[2].split()[0]) for m in mappings) << 10 >= count * nbytes
    assert [m.partition("\nRss:")[2].split()[:2] for m in mappings] == [["0", "kB"]]  # not a page was looked at
    addresses = [parameter.data_ptr() for parameter in model.rows]
    assert addresses == [addresses[0] + i * nbytes for i in range(count)]


# --------------------------------------------------------------------------------------------------- what is refused


def test_a_class_without_the_function(tmp_path: Path) -> None:
    path = one_file(tmp_path, published(wan()))
    with init_empty_weights():
        model = WanTransformer3DModel.from_config(dict(wan().config))
    refused(model, path, TypeError, "'WanTransformer3DModel'", "'_remap_ckpt_key'", "from_pretrained")
    model._remap_ckpt_key = lambda key: key  # of the class, not of one object
    refused(model, path, TypeError, "'WanTransformer3DModel'")

    class Opted(Wan):
        _remap_ckpt_key = None

    with init_empty_weights():
        refused(Opted.from_config(dict(wan().config)), path, TypeError, "'Opted'")
    with pytest.raises(TypeError, match="'dict'"):
        load_mapped_checkpoint({}, path)  # type: ignore[arg-type]


def test_nothing_on_the_meta_device(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Wan.from_config(dict(wan().config))
    path = one_file(tmp_path, published(wan()))
    refused(model, path, ValueError, "'Wan'", "nothing to fill", "init_empty_weights")


@pytest.mark.parametrize(
    ("answer", "texts"),
    [(7, ["returned 7"]), (b"a", ["returned b'a'"]), (KeyError("lost"), ["failed on", "KeyError('lost')"])],
    ids=["number", "bytes", "raises"],
)
def test_a_function_that_answers_nonsense(answer: object, texts: list[str], tmp_path: Path) -> None:
    class Wrong(Wan):
        @classmethod
        def _remap_ckpt_key(cls, key: str) -> Any:
            if "patch_embedding.bias" not in key:
                return Wan._remap_ckpt_key(key)
            if isinstance(answer, Exception):
                raise answer
            return answer

    with init_empty_weights():
        model = Wrong.from_config(dict(wan().config))
    path = one_file(tmp_path, published(wan()))
    refused(model, path, ValueError, "'Wrong'", f"'{PREFIX}patch_embedding.bias'", *texts)


def test_every_difference_is_in_one_error(tmp_path: Path) -> None:
    state = published(wan())
    bias = PREFIX + "layers.1.attn1.to_q.bias"
    shape = tuple(state[bias].shape)
    del state[PREFIX + "patch_embedding.weight"]
    state[PREFIX + "scale"] = torch.ones(2)
    state["patch_embedding.bias"] = state[PREFIX + "patch_embedding.bias"].clone()
    state[bias] = state[bias].to(torch.int32)
    table = PREFIX + "scale_shift_table"
    state[table] = state[table].flatten()
    message = refused(
        empty(),
        one_file(tmp_path, state),
        ValueError,
        "'Wan' cannot be filled from",
        "no key maps to them (1): patch_embedding.weight\n",
        f"parameter or persistent buffer (1): scale (from '{PREFIX}scale')\n",
        "several keys map to one name (1): patch_embedding.bias (from ",
        f"'{PREFIX}patch_embedding.bias'",
        " and ",
        "mismatched (2): scale_shift_table (",
        f"blocks.1.attn1.to_q.bias ({shape} int32 in the checkpoint, {shape} float32 in the model)\n",
        "Correct '_remap_ckpt_key' of 'Wan'",
    )
    assert "meta device, which" not in message and "different values" not in message


def test_long_lists_are_cut(tmp_path: Path) -> None:
    state = published(wan())
    few = {key: state[key] for key in list(state)[:2]} | {f"{PREFIX}new.{i:03}": torch.ones(1) for i in range(25)}
    missing = len(state) - 3  # two are there, and the one of the VAE is not for this model
    message = refused(
        empty(), one_file(tmp_path, few), ValueError, f"({missing}): ", f" and {missing - 20} more\n", "new.019 (from "
    )
    assert "new.020" not in message and " and 5 more\n" in message


def test_buffers_on_the_meta_device(tmp_path: Path) -> None:
    """A persistent one is filled; one that no checkpoint holds cannot be."""
    reference = toys.toy(toys.Stack, 1, toys.MixedBlock, seed=4)
    state = {name: tensor.clone().contiguous() for name, tensor in reference.state_dict().items()}
    model = Stack(1, toys.MixedBlock).to("meta")
    path = one_file(tmp_path, state)
    message = refused(model, path, ValueError, "accelerate.init_empty_weights()", "(1): blocks.0.table")
    assert "missing" not in message
    table = torch.ones(16, dtype=torch.float64)
    model.blocks[0].register_buffer("table", table, persistent=False)
    save_file({**state, "blocks.0.table": torch.zeros(16, dtype=torch.float64)}, path)
    refused(model, path, ValueError, "unexpected", "(1): blocks.0.table (from 'blocks.0.table')")
    save_file(state, path)
    load_mapped_checkpoint(model, path)
    assert_filled(model, reference.state_dict(), tmp_path)
    assert model.blocks[0].table is table


def test_a_persistent_buffer_or_a_real_parameter_without_a_key(tmp_path: Path) -> None:
    reference = toys.toy(toys.Stack, 1, toys.CountingBlock)
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    del state["blocks.0.calls"], state["inp.bias"]
    model = empty(Stack, 1, toys.CountingBlock)
    model.inp.bias = nn.Parameter(torch.zeros(16))
    refused(model, one_file(tmp_path, state), ValueError, "missing", "(2): inp.bias, blocks.0.calls\n")


def test_tied_in_the_model_but_not_in_the_checkpoint(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in toys.toy(toys.Tied).state_dict().items()}
    with torch.device("meta"):
        model = Tied()
    state["out.weight"][3, 3] += 1
    path = one_file(tmp_path, state)
    refused(model, path, ValueError, "different values in the checkpoint (1): out.weight and blocks.2.down.weight")
    state["out.weight"] = state["blocks.2.down.weight"].double()
    save_file(state, path)
    refused(model, path, ValueError, "different values in the checkpoint (1): out.weight and blocks.2.down.weight")


def test_a_tie_lost_on_the_meta_device(tmp_path: Path) -> None:
    """accelerate's context makes a parameter of each assignment; tying again mends it, as the error says."""

    class T5(T5EncoderModel):
        _remap_ckpt_key = staticmethod(lambda key: key)

    torch.manual_seed(0)
    reference = zoo.TEXT_ENCODERS["t5"].build(1)
    state = {name: t.clone() for name, t in reference.state_dict().items() if name != "encoder.embed_tokens.weight"}
    with init_empty_weights():
        model = T5(reference.config)
        model.encoder.embed_tokens.weight = model.shared.weight
    path = one_file(tmp_path, state)
    refused(model, path, ValueError, "missing", "(1): encoder.embed_tokens.weight\n", "model.tie_weights()")
    model.tie_weights()
    load_mapped_checkpoint(model, path)
    assert model.encoder.embed_tokens.weight is model.shared.weight
    assert_filled(model, reference.state_dict(), tmp_path)


def test_a_tensor_of_another_class(tmp_path: Path) -> None:
    class Quantized(nn.Parameter):
        pass

    model = empty()
    model.patch_embedding.bias = Quantized(model.patch_embedding.bias.detach(), requires_grad=False)
    path = one_file(tmp_path, published(wan()))
    refused(model, path, ValueError, "mismatched (1): patch_embedding.bias (a Quantized in the model")


# ------------------------------------------------------------------------------------------------------- bad files


DAMAGED: dict[str, tuple[Any, int, str]] = {
    "truncated": ({"a": entry(0, 8), "b": entry(8, 16)}, 12, "not fully covered"),
    "bytes after the last tensor": ({"a": entry(0, 8)}, 16, "not fully covered"),
    "bytes and no tensor": ({}, 8, "not fully covered"),
    "offsets past the end": ({"a": entry(0, 8), "b": entry(8, 8 << 20, (((8 << 20) - 8) // 4,))}, 16, "not fully"),
    "offsets past all memory": ({"a": entry(2**63, 2**63 + 8)}, 8, "invalid offset"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "invalid offset"),
    "one range for two": ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "invalid offset"),
    "hole": ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "invalid offset for tensor `b`"),
    "hole at the start": ({"a": entry(4, 12)}, 12, "invalid offset"),
    "shape too large": ({"a": entry(0, 8, (3,))}, 8, "invalid shape, data type, or offset"),
    "shape too small": ({"a": entry(0, 8, (1,))}, 8, "invalid shape, data type, or offset"),
    "dtype too small": ({"a": entry(0, 8, (2,), "F16")}, 8, "invalid shape, data type, or offset"),
    "range backwards": ({"a": entry(8, 0)}, 8, "invalid"),
    "negative shape": ({"a": entry(0, 8, (-2,))}, 8, "invalid value"),
    "shape past all numbers": ({"a": entry(0, 8, (2**62, 4))}, 8, "overflow"),
    "unknown dtype": ({"a": entry(0, 8, (2,), "X9")}, 8, "unknown variant `X9`"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "missing field `data_offsets`"),
    "no header": ([], 8, "invalid JSON in header"),
}
"""Headers that lie, and what safetensors itself says of them."""


@pytest.mark.parametrize("kind", DAMAGED)
def test_headers_that_safetensors_refuses(kind: str, tmp_path: Path) -> None:
    header, nbytes, reason = DAMAGED[kind]
    path = hand_made(tmp_path / "bad.safetensors", header, nbytes)
    with pytest.raises(SafetensorError):
        safe_open(path, framework="pt")
    refused(empty(), path, RuntimeError, f"'{path}' cannot be used", reason, "force_download=True")
    # The same as one shard among good ones.
    weight_map = {"a": path.name, **dict.fromkeys(published(wan()), "good.safetensors")}
    save_file(published(wan()), tmp_path / "good.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(empty(), tmp_path, RuntimeError, f"'{path}' cannot be used", reason)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "header too small"),
        (b"abc", "header too small"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "header too large"),
        (struct.pack("<Q", 1000) + b"{}", "invalid header length"),
        (struct.pack("<Q", 8) + b'{"a":   ', "invalid JSON"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "invalid UTF-8"),
    ],
    ids=["empty", "short", "git-lfs", "cut header", "no json", "no text"],
)
def test_files_without_a_header(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    refused(empty(), path, RuntimeError, f"'{path}' cannot be used", reason, "force_download=True")


def test_a_name_twice_in_a_header_which_safetensors_accepts(tmp_path: Path) -> None:
    for first in (entry(0, 8), entry(0, 8, (1, 2)), entry(0, 4, (1,))):
        raw = f'{{"a": {json.dumps(first)}, "a": {json.dumps(entry(0, 8))}}}'.encode()
        path = hand_made(tmp_path / "bad.safetensors", None, 8, raw=raw)
        with safe_open(path, framework="pt") as file:
            assert file.get_tensor("a").shape == (2,)
        refused(empty(), path, RuntimeError, f"'{path}' cannot be used: 'a' is in it twice")


def test_dtypes_of_less_than_a_byte(tmp_path: Path) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in "abc":
                self.register_parameter(name, nn.Parameter(torch.empty(16)))

        _remap_ckpt_key = staticmethod(lambda key: key)

    whole = {"a": entry(0, 64, (16,)), "c": entry(64, 128, (16,))}
    for dtype, nbytes in (("F4", 8), ("F6_E2M3", 12)):
        header = {**whole, "b": entry(128, 128 + nbytes, (16,), dtype)}
        path = hand_made(tmp_path / "small.safetensors", header, 128 + nbytes)
        safe_open(path, framework="pt").__exit__(None, None, None)  # which safetensors itself opens
        text = f"mismatched (1): b ((16,) {dtype} in the checkpoint, (16,) float32 in the model)\n"
        refused(empty(Small), path, ValueError, text)


def test_every_dtype_and_shape_of_a_file(tmp_path: Path) -> None:
    """Also at odd addresses, as a header whose length is no multiple of 8 makes them, and of no elements."""
    tensors = {str(dtype)[6:]: torch.arange(6).reshape(2, 3).float().to(dtype) for dtype in DTYPES}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(2.5), "last": torch.empty(3, 0)}

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, tensor in tensors.items():
                self.register_buffer(f"of_{name}", tensor.to("meta"))

        _remap_ckpt_key = staticmethod(lambda key: f"of_{key}")

    save_file(tensors, tmp_path / "even.safetensors")
    data = (tmp_path / "even.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    odd = struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :]
    (tmp_path / "odd.safetensors").write_bytes(odd)
    for name in ("even", "odd"):
        model = load_mapped_checkpoint(Small(), tmp_path / f"{name}.safetensors")
        for key, tensor in tensors.items():
            filled = model.get_buffer(f"of_{key}")
            assert filled.dtype == tensor.dtype and filled.shape == tensor.shape and filled.is_contiguous()
            assert flat_bytes(filled).tolist() == flat_bytes(tensor).tolist()
            assert filled.storage_offset() == 0 and filled.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ('{"weight_map": {"a": ', "Expecting value"),
        ("[]", "no 'weight_map'"),
        ('{"metadata": {}}', "no 'weight_map'"),
        ('{"weight_map": ["a"]}', "no 'weight_map'"),
        ('{"weight_map": {"a": 1}}', "no 'weight_map'"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' is in it twice"),
        ('{"weight_map": {"a": "x.safetensors"}}', "files that are not there: x.safetensors"),
        ("[" * 100_000, "recursion"),
        ("\udcff", "decode"),
    ],
)
def test_an_index_that_cannot_be_read(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    for given in (path, tmp_path):
        refused(empty(), given, RuntimeError, f"'{path}' cannot be used", reason, "force_download=True")


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/../../x", "sub/x.safetensors", "..", "", "\0"]
)
def test_an_index_that_leads_out_of_its_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(published(wan()), tmp_path / "x.safetensors")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": dict.fromkeys(published(wan()), name)}))
    refused(empty(), path, ValueError, f"'{path}'", repr(name), "out of its directory")


def test_an_index_that_disagrees_with_its_files(tmp_path: Path) -> None:
    path = shard(tmp_path, published(wan()))
    content = json.loads(path.read_text())

    def rewrite(weight_map: dict[str, str]) -> None:
        path.write_text(json.dumps({"weight_map": weight_map}))

    weight_map = content["weight_map"]
    rewrite({**weight_map, "x": weight_map["vae.weight"]})
    refused(empty(), path, RuntimeError, f"'{path}' cannot be used: '{weight_map['vae.weight']}' lacks keys", ": x.")
    bias = PREFIX + "patch_embedding.bias"
    elsewhere = next(name for name in weight_map.values() if name != weight_map[bias])
    rewrite({**weight_map, bias: elsewhere})
    refused(empty(), path, RuntimeError, f"'{path}' cannot be used: '", bias)
    rewrite({key: name for key, name in weight_map.items() if key != bias})
    refused(empty(), path, RuntimeError, f"'{weight_map[bias]}' holds '{bias}', which it does not list there")
    # What the model does not use may be unlisted.
    rewrite({key: name for key, name in weight_map.items() if key != "vae.weight"})
    model = load_mapped_checkpoint(empty(), path)
    assert_filled(model, wan().state_dict(), tmp_path)
    del model
    (tmp_path / elsewhere).unlink()
    refused(empty(), path, RuntimeError, f"'{path}' cannot be used", f"files that are not there: {elsewhere}")


def test_a_file_that_is_cut_off_meanwhile(tmp_path: Path) -> None:
    """Mapping what is not there would end the process at the first read; the other shards do not stay mapped."""
    path = shard(tmp_path, published(wan()))
    last = tmp_path / list(json.loads(path.read_text())["weight_map"].values())[-1]

    class Cutting(Wan):
        @staticmethod
        def _remap_ckpt_key(key: str) -> str | None:
            os.truncate(last, 4096)
            return Wan._remap_ckpt_key(key)

    with init_empty_weights():
        model = Cutting.from_config(dict(wan().config))
    refused(model, path, RuntimeError, f"'{last}' cannot be mapped", "smaller", "anew")


def test_a_key_in_two_shards_is_a_duplicate(tmp_path: Path) -> None:
    """Two files that both hold a tensor, under keys that map to one name."""
    state = published(wan())
    bias = PREFIX + "patch_embedding.bias"
    path = shard(tmp_path, {**state, "patch_embedding.bias": state[bias].clone()})
    weight_map = json.loads(path.read_text())["weight_map"]
    assert weight_map[bias] != weight_map["patch_embedding.bias"]
    message = refused(empty(), path, ValueError, "duplicated, several keys map to one name (1): patch_embedding.bias")
    assert f"'{bias}'" in message and " and " in message and "'patch_embedding.bias'" in message


def test_folders_without_one_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"")
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    (tmp_path / ".hidden.safetensors").write_bytes(b"")
    (tmp_path / "folder.safetensors").mkdir()
    refused(empty(), tmp_path, RuntimeError, f"no safetensors in '{tmp_path}'", ".bin", "convert")
    refused(empty(), tmp_path / "diffusion_pytorch_model.bin", RuntimeError, "model.bin' is no safetensors", "Convert")
    refused(empty(), tmp_path / "lost.safetensors", RuntimeError, "No safetensors at '", "lost.safetensors'")
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "b.safetensors")
    refused(empty(), tmp_path, ValueError, f"'{tmp_path}' holds several checkpoints: a.safetensors, b.safetensors.")
    shard(tmp_path, published(wan()), "y")
    model = load_mapped_checkpoint(empty(), tmp_path)  # one index: the others are its shards, or not for it
    del model
    shard(tmp_path, published(wan()), "z")
    both = "y.safetensors.index.json, z.safetensors.index.json"
    refused(empty(), tmp_path, ValueError, f"'{tmp_path}' holds several checkpoints: {both}.")
    (tmp_path / "y.safetensors.index.json").unlink()
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    both = "z.safetensors.index.json, model.safetensors"
    refused(empty(), tmp_path, ValueError, f"'{tmp_path}' holds several checkpoints: {both}.")


def test_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("../blobs/gone")
    refused(empty(), tmp_path, RuntimeError, "No safetensors at '", "model.safetensors'")


# --------------------------------------------------------------------------------------------- supports_mmap_loading


class Flux(FluxTransformer2DModel):
    _remap_ckpt_key = staticmethod(lambda key: key)


def pipeline(transformer: nn.Module | None, **components: Any) -> FluxPipeline:
    names = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    absent = {name: None for name in names if name not in components}
    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **absent, **components)


def test_a_class_with_the_function_supports_mapped_loading() -> None:
    reference = zoo.MODELS["flux"].build(2)
    with init_empty_weights():
        model = Flux.from_config(dict(reference.config))
        without = FluxTransformer2DModel.from_config(dict(reference.config))
    assert supports_mmap_loading(model)
    assert supports_mmap_loading(torch.compile(model, backend="eager"))
    assert supports_mmap_loading(pipeline(model))
    for other in (without, reference):
        assert not supports_mmap_loading(other)
        assert not supports_mmap_loading(pipeline(other))


def test_views_of_mapped_files_support_mapped_loading(tmp_path: Path) -> None:
    zoo.MODELS["flux"].build(2).save_pretrained(tmp_path / "flux")

    def load(dtype: torch.dtype) -> FluxTransformer2DModel:
        return FluxTransformer2DModel.from_pretrained(tmp_path / "flux", torch_dtype=dtype)

    model = load(torch.float32)
    assert supports_mmap_loading(model) and supports_mmap_loading(pipeline(model))
    assert not supports_mmap_loading(load(torch.bfloat16))
    with torch.no_grad():
        model.proj_out.weight.add_(1)  # outside the blocks
    assert supports_mmap_loading(model)
    with torch.no_grad():
        model.transformer_blocks[0].attn.to_q.weight.add_(1)
    assert not supports_mmap_loading(model)


def test_each_component_that_streams_must_qualify(tmp_path: Path) -> None:
    with init_empty_weights():
        transformer = Flux.from_config(dict(zoo.MODELS["flux"].build(2).config))
    encoder = zoo.TEXT_ENCODERS["t5"].build(4)
    largest = max(sum(p.nbytes for p in block.parameters()) for block in transformer.transformer_blocks)
    assert sum(p.nbytes for p in encoder.parameters()) > largest  # so it streams
    assert not supports_mmap_loading(pipeline(transformer, text_encoder_2=encoder))
    encoder.save_pretrained(tmp_path)
    mapped = T5EncoderModel.from_pretrained(tmp_path)
    assert supports_mmap_loading(pipeline(transformer, text_encoder_2=mapped))


def test_what_cannot_stream_does_not_support_it() -> None:
    for nothing in (pipeline(None), nn.Linear(2, 2), object(), None, "path"):
        assert supports_mmap_loading(nothing) is False


def test_a_file_that_was_cut_off_does_not_support_it(tmp_path: Path) -> None:
    zoo.MODELS["flux"].build(1).save_pretrained(tmp_path)
    model = FluxTransformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.float32)
    assert supports_mmap_loading(model)
    os.truncate(next(tmp_path.glob("*.safetensors")), 4096)
    assert not supports_mmap_loading(model)
