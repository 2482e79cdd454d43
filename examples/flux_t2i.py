# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Text to image with Flux, one picture per rank; transformer and T5 stream from the host's one copy of their weights.

A tiny model with random weights, in one process and in two (`accelerate launch` does as well as `torchrun`):
    python examples/flux_t2i.py
    torchrun --nproc_per_node 2 examples/flux_t2i.py
A real model, on eight accelerators:
    accelerate launch --num_processes 8 examples/flux_t2i.py --model PATH_OR_HUB_ID --prompts prompts.txt
"""

import contextlib
import time

import torch
from common import Example, launched, parse_arguments, save_image
from diffusers import FluxPipeline
from tiny_checkpoints import build_tiny_flux

import diffusers_dlo


EXAMPLE = Example(
    name="flux_t2i",
    pipeline=FluxPipeline,
    build_tiny=build_tiny_flux,
    tiny_call={"height": 256, "width": 256, "num_inference_steps": 4},
    writes_video=False,
)


def main() -> None:
    args = parse_arguments(EXAMPLE)
    with launched() as worker:
        path = args.model or worker.tiny_checkpoint(EXAMPLE, args.cache_dir)
        # A checkpoint in another dtype is then cast once, by all ranks together, when the offload is enabled.
        with contextlib.nullcontext() if args.no_offload else diffusers_dlo.mapped_loading():
            pipe = FluxPipeline.from_pretrained(path, dtype=torch.bfloat16)
        pipe.set_progress_bar_config(disable=not worker.is_local_main)

        handle = None
        if args.no_offload:
            pipe.to(worker.device)
        else:
            handle = pipe.enable_distributed_layerwise_offload(
                transfer=args.transfer, num_slots=args.num_slots, host=args.host
            )
            worker.print(handle.plan)

        for job in worker.jobs(args):
            start = time.perf_counter()
            image = pipe(prompt=job.prompt, generator=job.generator, **args.call).images[0]
            seconds = time.perf_counter() - start
            worker.tell(f"'{job.prompt}' took {seconds:.1f} s, {save_image(image, job.path)}")

        if handle is not None:
            handle.join()  # so that the report is complete
            worker.print(handle.report())


if __name__ == "__main__":
    main()
