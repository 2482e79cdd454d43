# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Times one forward of a stack of Cosmos3-Nano-sized layers with random weights: all resident, and streamed by this
package.

    torchrun --nproc_per_node 2 benchmarks/stack.py --layers 36
    python benchmarks/stack.py --layers 36 --variants resident,local
    torchrun --nproc_per_node 2 benchmarks/stack.py --checkpoint DIR --variants resident,cold,mapped,pinned

With `--checkpoint`, the weights are written to DIR as a sharded safetensors checkpoint (or found there), and streamed
from there. `cold` enables after the page cache has let go of the files, and stands beside the rate at which one thread
reads them in order.

Both sides run in one process on the same inputs; outputs are compared bit by bit. Beside each time stands its ratio to
the limit of the machine: the larger of the resident time and the time the link alone needs.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3VLTextMoTDecoderLayer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from diffusers_dlo import apply_distributed_layerwise_offload


LAYER = {
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "qk_norm_for_text": True,
    "use_und_k_norm_for_gen": False,
}
TEXT_TOKENS = 256
CPU = torch.device("cpu")
VARIANTS = {
    "resident": None,
    "auto": {},
    "pinned": {"host": "pinned"},
    "local": {"transfer": "local"},
    "slots3": {"num_slots": 3},
    "mapped": {"host": "mapped"},
    "cold": {"host": "mapped"},
    "packed": {"host": "packed"},
}
LAYERS_PER_FILE = 9


class Stack(nn.Module):
    """Layers, and one small module beside them, as real models have."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.rest = nn.Linear(8, 8)

    def forward(self, text: torch.Tensor, video: torch.Tensor, rotary: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            text, video = layer(text, video, rotary)
        return text, video


def make_stack(count: int, device: torch.device, home: torch.device) -> Stack:
    """`count` layers on `home`, with weights drawn on `device` from a seed for each layer."""
    return Stack([make_layer(index, device, home) for index in range(count)])


def make_layer(index: int, device: torch.device, home: torch.device) -> nn.Module:
    """One layer."""
    with torch.device("meta"):
        layer = Cosmos3VLTextMoTDecoderLayer(**LAYER).to(torch.bfloat16)
    generator = torch.Generator(device=device).manual_seed(index)
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            weight = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if weight.ndim == 1:
                weight.fill_(1)
            else:
                weight.normal_(0, 0.02, generator=generator)
            setattr(module, name, nn.Parameter(weight.to(home), requires_grad=False))
    return layer.eval()


def write_checkpoint(folder: Path, count: int, device: torch.device) -> None:
    """`count` layers as a sharded checkpoint, in the order and with the names that `save_pretrained` gives them."""
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, count, LAYERS_PER_FILE):
        state = {}
        for index in range(first, min(first + LAYERS_PER_FILE, count)):
            state |= {
                f"layers.{index}.{name}": p.data for name, p in make_layer(index, device, CPU).named_parameters()
            }
        save_file(state, folder / f"layers-{first:05}.safetensors")


def load_stack(folder: Path, count: int) -> Stack:
    """The layers of a checkpoint as `from_pretrained` leaves them: views of the mapped files."""
    with torch.device("meta"):
        layers = [Cosmos3VLTextMoTDecoderLayer(**LAYER).eval() for _ in range(count)]
    stack = Stack(layers)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                owner, _, name = key.rpartition(".")
                if int(key.split(".")[1]) < count:
                    parameter = nn.Parameter(file.get_tensor(key), requires_grad=False)
                    setattr(stack.get_submodule(owner), name, parameter)
    return stack


def evict(folder: Path) -> float:
    """Has the page cache let go of a checkpoint; the part of it, 0 to 1, that stayed."""
    os.sync()
    stayed = total = 0
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for offset in range(0, path.stat().st_size, 64 << 20):
                total += 1
                try:
                    os.preadv(file.fileno(), [bytearray(1)], offset + (32 << 20), os.RWF_NOWAIT)
                    stayed += 1
                except OSError:
                    pass
    return stayed / max(total, 1)


def read_rate(folder: Path) -> float:
    """Bytes per second at which one thread reads a checkpoint from disk in order, in pieces of 16 MiB."""
    evict(folder)
    buffer, nbytes, start = bytearray(16 << 20), 0, time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                nbytes += count
    return nbytes / (time.perf_counter() - start)


def make_inputs(tokens: int, device: torch.device) -> tuple:
    """Inputs of one forward for `tokens` video tokens."""
    generator = torch.Generator(device=device).manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

    text, video = draw(TEXT_TOKENS, 4096), draw(tokens, 4096)
    rotary = tuple(draw(n, 128).clamp(-1, 1) for n in (TEXT_TOKENS, TEXT_TOKENS, tokens, tokens))
    return text, video, rotary


def measure(model: nn.Module, inputs: tuple, repeats: int) -> tuple[float, str]:
    """The best time of a forward in seconds, and a digest of both outputs' bytes."""
    times = []
    with torch.inference_mode():
        for _ in range(2):
            output = model(*inputs)
        torch.cuda.synchronize()
        barrier()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(repeats):
            start = time.perf_counter()
            output = model(*inputs)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        digest = hashlib.sha256()
        for tensor in output:
            digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return min(times), digest.hexdigest()


def h2d_rate(device: torch.device, nbytes: int = 1 << 30) -> float:
    """Bytes per second from pinned memory to this device, with all ranks copying at once."""
    host, target = (
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(nbytes, dtype=torch.uint8, device=device),
    )
    best = float("inf")
    for _ in range(5):
        barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return nbytes / best


def note(rank: int, text: str) -> None:
    """Says on rank 0 what is being done, since all of it takes minutes."""
    if rank == 0:
        print(f"[{time.strftime('%X')}] {text}", file=sys.stderr, flush=True)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", default="1024,26000")
    parser.add_argument("--variants", default="resident,auto", help=", ".join(VARIANTS))
    parser.add_argument("--checkpoint", type=Path, help="directory of a checkpoint to write, or to find, and to load")
    parser.add_argument("--json", help="append the results to this file")
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl", device_id=device)
    rate = h2d_rate(device)
    disk = 0.0
    if args.checkpoint is not None:
        if rank == 0:
            if not any(args.checkpoint.glob("*.safetensors")):
                note(rank, f"writing {args.layers} layers to {args.checkpoint}")
                write_checkpoint(args.checkpoint, args.layers, device)
            if "cold" in args.variants.split(","):
                disk = read_rate(args.checkpoint)
                note(rank, f"one thread reads {disk / 1e9:.2f} GB/s from disk")
        barrier()
    rows = []
    for variant in args.variants.split(","):
        options = VARIANTS[variant]
        note(rank, f"{variant}: making {args.layers} layers")
        if args.checkpoint is not None:
            model = load_stack(args.checkpoint, args.layers)
        else:
            model = make_stack(args.layers, device, device if options is None else CPU)
        handle, seconds = None, 0.0
        if options is None:
            model.to(device)
        else:
            barrier()
            if variant == "cold" and rank == 0:
                note(rank, f"{evict(args.checkpoint):.1%} of the checkpoint stays in the page cache")
            barrier()
            start = time.perf_counter()
            handle = apply_distributed_layerwise_offload(model, **options)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            note(rank, f"{variant}: enabled in {seconds:.2f} s")
        gc.collect()
        torch.cuda.empty_cache()
        weights = torch.cuda.memory_allocated()
        for tokens in map(int, args.tokens.split(",")):
            inputs = make_inputs(tokens, device)
            best, bits = measure(model, inputs, 5 if tokens < 10000 else 2)
            row = {"variant": variant, "ranks": world, "layers": args.layers, "tokens": tokens, "ms": best * 1e3}
            row |= {"bits": bits, "weights_gib": weights / 2**30, "enable_s": seconds, "h2d_gb_s": rate / 1e9}
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            if handle is not None:
                shards = 1 if handle.plan.components[0].transfer == "local" else world
                row["link_ms"] = handle.plan.streamed_nbytes / shards / rate * 1e3
                row["host"] = handle.report().host_kind
                row["extents"] = handle.report().extents_per_block
                row["enable_gb_s"] = handle.plan.streamed_nbytes / seconds / 1e9
                row["disk_gb_s"] = disk / 1e9
            rows.append(row)
            note(rank, f"{variant}: {tokens} tokens in {row['ms']:.1f} ms")
        if handle is not None:
            handle.remove()
        del model, handle, inputs
        gc.collect()
        torch.cuda.empty_cache()
    every: list = [None] * world
    if world > 1:
        dist.all_gather_object(every, rows)
    else:
        every = [rows]
    for row, *others in zip(*every):  # the slowest rank counts, and a difference on any
        for key in ("ms", "enable_s"):
            row[key] = max(row[key], *(other[key] for other in others), 0)
        if any(other["bits"] != row["bits"] for other in others):
            row["bits"] = "differs between ranks"
    rows = every[0]
    if rank == 0:
        resident = {row["tokens"]: row for row in rows if row["variant"] == "resident"}
        for row in rows:
            known = resident.get(row["tokens"])
            limit = max(row.get("link_ms", 0.0), known["ms"] if known else 0.0)
            row["equal"] = None if known is None else row["bits"] == known["bits"]
            row["to_limit"] = row["ms"] / limit if limit else None
            print(json.dumps(row))
        if args.json:
            with open(args.json, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
