# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""Text to video with Wan 2.2, one video per rank; both transformers, for early and late steps, are streamed.

A tiny model with random weights, in one process and in two (`accelerate launch` does as well as `torchrun`):
    python examples/wan_t2v.py
    torchrun --nproc_per_node 2 examples/wan_t2v.py
A real model, on eight accelerators:
    accelerate launch --num_processes 8 examples/wan_t2v.py --model PATH_OR_HUB_ID --prompts prompts.txt
"""

import contextlib
import time

import torch
from common import Example, launched, parse_arguments, save_video
from diffusers import WanPipeline
from tiny_checkpoints import build_tiny_wan

import diffusers_dlo


EXAMPLE = Example(
    name="wan_t2v",
    pipeline=WanPipeline,
    build_tiny=build_tiny_wan,
    tiny_call={"height": 128, "width": 128, "num_frames": 17, "num_inference_steps": 4},
    writes_video=True,
)


def main() -> None:
    args = parse_arguments(EXAMPLE)
    with launched() as worker:
        path = args.model or worker.tiny_checkpoint(EXAMPLE, args.cache_dir)
        # A checkpoint in another dtype is then cast once, by all ranks together, when the offload is enabled.
        with contextlib.nullcontext() if args.no_offload else diffusers_dlo.mapped_loading():
            pipe = WanPipeline.from_pretrained(path, dtype=torch.bfloat16)
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
            video = pipe(prompt=job.prompt, generator=job.generator, output_type="pil", **args.call).frames[0]
            seconds = time.perf_counter() - start
            worker.tell(f"'{job.prompt}' took {seconds:.1f} s, {save_video(video, job.path, fps=16)}")

        if handle is not None:
            handle.join()  # so that the report is complete
            worker.print(handle.report())


if __name__ == "__main__":
    main()
