# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""A server whose ranks compute on the GPUs of the host."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from diffusers import Cosmos3OmniPipeline


pytest.importorskip("fastapi", reason="needs the extra 'serve'")

from diffusers_dlo.serve.demo import build_tiny_cosmos3
from diffusers_dlo.serve.media import png
from tests.serve.process import ServerProcess


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CALL = {"num_inference_steps": 2}


def solo(path: Path, seed: int) -> bytes:
    """What the pipeline gives that is on a GPU whole."""
    pipe = Cosmos3OmniPipeline.from_pretrained(path, dtype=torch.bfloat16).to("cuda")
    generator = torch.Generator("cpu").manual_seed(seed)
    return png(pipe(prompt="a red fox", width=64, height=64, num_frames=1, generator=generator, **CALL).video[0])


def test_each_gpu_takes_requests(tmp_path: Path) -> None:
    """Bit-equal to the pipeline without offload, whichever GPU answers; all take part."""
    size = torch.cuda.device_count()
    path = build_tiny_cosmos3(tmp_path / "cosmos3")
    expected = [solo(path, seed) for seed in (0, 1)]
    options = ("--data-parallel-size", str(size))
    with ServerProcess(tmp_path / "log", *options, model=str(path)) as server:

        def ask(index: int) -> bytes:
            request = {"prompt": "a red fox", "size": "64x64", "seed": index % 2, "response_format": "png", **CALL}
            answer = server.post("/v1/images/generations", json=request)
            assert answer.status_code == 200, answer.text
            return answer.content

        with ThreadPoolExecutor(2 * size) as clients:
            got = list(clients.map(ask, range(6 * size)))
        assert [picture == expected[index % 2] for index, picture in enumerate(got)] == [True] * (6 * size)
        figures = server.get("/metrics").text
        assert all(f'rank="{rank}"' in figures for rank in range(size)), figures
