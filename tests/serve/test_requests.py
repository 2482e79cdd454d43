# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""What a request may ask for, and what the pipeline is called with: options, limits, arguments, waves; no ranks."""

from __future__ import annotations

import argparse
import pathlib
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError

from diffusers_dlo.serve.arguments import Request, check_extra, pipeline_arguments
from diffusers_dlo.serve.checks import BadRequestError, image_requests, video_request
from diffusers_dlo.serve.media import pictures_of
from diffusers_dlo.serve.options import Limits, ServeOptions, add_arguments, read_options
from diffusers_dlo.serve.schemas import ImageRequest, VideoRequest
from diffusers_dlo.serve.waves import differences


def read(*arguments: str) -> ServeOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_options(parser.parse_args(arguments))


def test_the_command_line_and_the_names_of_the_original(tmp_path: pathlib.Path) -> None:
    plain = read()
    assert plain.demo and plain.loopback and plain.name == "demo"
    assert plain == ServeOptions()
    aliases = read(
        *("owner/model", "--enable-distributed-layerwise-offload", "--dlo-use-allgather", "--vae-use-tiling"),
        *("--data-parallel-size", "8", "--host", "0.0.0.0", "--device-budget", "12GiB", "--max-body", "2MiB"),
    )
    assert (aliases.model, aliases.name, aliases.ranks) == ("owner/model", "owner/model", 8)
    assert (aliases.transfer, aliases.vae_tiling, aliases.device_budget) == ("all_gather", True, 12 * 2**30)
    assert aliases.limits.body == 2**21 and not aliases.loopback and not aliases.demo
    assert read("--dlo-no-use-allgather").transfer == "local"
    key = tmp_path / "key"
    key.write_text("secret\n")
    assert read("--api-key-file", str(key)).api_key == read("--api-key", " secret ").api_key == "secret"
    reached = {host: read("--host", host).loopback for host in ("127.1.2.3", "::1", "LOCALHOST", "0.0.0.0", "::", "")}
    assert [host for host, only_here in reached.items() if only_here] == ["127.1.2.3", "::1", "LOCALHOST"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["owner/model", "--demo"], "'owner/model' is not needed"),
        (["--api-key", " "], "would keep nobody out"),
        (["--api-key", "a", "--api-key-file", "b"], "leave one of them out"),
        (["--api-key", "schlüssel"], "no header carries"),
        (["--api-key", "a\nb"], "no header carries"),
    ],
    ids=("demo-and-model", "empty-key", "two-keys", "umlaut-key", "key-of-lines"),
)
def test_options_that_contradict_each_other(arguments: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(*arguments)


LIMITED = ServeOptions(limits=Limits(size=128, steps=10, frames=33, n=3, prompt=20))


def test_pictures_of_one_request_have_seeds_in_a_row() -> None:
    made = image_requests(ImageRequest(prompt="a fox", n=3, seed=2**63 - 2, size="128x64"), LIMITED)
    assert [one.seed for one in made] == [2**63 - 2, 2**63 - 1, 0]
    assert {(one.kind, one.width, one.height, one.num_frames) for one in made} == {("image", 128, 64, None)}
    drawn = {image_requests(ImageRequest(prompt="a fox"), LIMITED)[0].seed for _ in range(5)}
    assert len(drawn) > 1, "without a seed, requests have the same noise"


def test_a_video_has_frames_or_seconds() -> None:
    assert video_request(VideoRequest(prompt="a fox", seconds=4, fps=8), LIMITED).num_frames == 33
    made = video_request(VideoRequest(prompt="a fox", num_frames=9, extra_params='{"eta": 0.5}'), LIMITED)
    assert (made.num_frames, made.fps, made.width, made.extra_args) == (9, 24, None, {"eta": 0.5})


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"size": "144x16"}, r"'size' asks for 144; .* 128 \(--max-size\)"),
        ({"num_inference_steps": 11}, r"allows 10 \(--max-steps\)"),
        ({"n": 4}, r"allows 3 \(--max-n\)"),
        ({"prompt": 21 * "a"}, "'prompt' has 21 characters"),
        ({"negative_prompt": 21 * "a"}, "'negative_prompt' has 21 characters"),
        ({"model": "other"}, "'other' is not served here; 'demo' is"),
        ({"n": 2, "response_format": "png"}, "one answer is one file"),
        ({"extra_params": {"height": 10_000}}, "use the field"),
        ({"extra_params": {"num_images_per_prompt": 10_000}}, "'num_images_per_prompt' cannot be given"),
        ({"extra_params": {"sigmas": [1.0]}}, "'sigmas' .* only scalars"),
        ({"extra_params": {"eta": 1e300}}, "at most"),
        ({"extra_params": {"eta": 201 * "a"}}, "201 characters"),
    ],
    ids=(
        *("size", "steps", "n", "prompt", "negative", "model", "files", "own-field", "amount"),
        *("list", "number", "text"),
    ),
)
def test_a_picture_beyond_a_limit_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequestError, match=said) as raised:
        image_requests(ImageRequest(**{"prompt": "a fox", **fields}), LIMITED)
    assert raised.value.param in fields or raised.value.param == "n"


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"num_frames": 34}, r"allows 33 \(--max-frames\)"),
        ({"seconds": 2, "fps": 24}, "'num_frames' asks for 49"),
        ({"seconds": 1, "num_frames": 9}, "say the same"),
        ({"extra_params": "{"}, "not JSON"),
        ({"extra_params": "[" * 100_000}, "not JSON"),
        ({"extra_params": "[1]"}, "has to be a JSON object"),
        ({"extra_params": '{"eta": NaN}'}, "'eta' in 'extra_params' is nan"),
    ],
    ids=("frames", "seconds", "both", "text", "deep", "list", "nan"),
)
def test_a_video_beyond_a_limit_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        video_request(VideoRequest(**{"prompt": "a fox", **fields}), LIMITED)


@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": "1x1"},
        {"size": "0x1"},
        {"size": "1x1\n"},
        {"seed": -1},
        {"seed": 2**63},
        {"guidance_scale": float("inf")},
    ],
    ids=("unknown", "zero", "newline", "negative", "large", "infinite"),
)
def test_a_field_of_a_wrong_form_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ImageRequest(**{"prompt": "a fox", **fields})


class Painter:
    """The signature of a pipeline of pictures."""

    def __call__(
        self,
        prompt: str | list[str],
        height: int | None = None,
        width: int | None = None,
        eta: float = 0.0,
        image: Image.Image | str | None = None,
        sigmas: list[float] | None = None,
        anything=None,
    ) -> None: ...


class Filmer(Painter):
    """The signature of a pipeline of videos."""

    def __call__(
        self, prompt: str, num_frames: int = 81, num_inference_steps: int = 50, fps: float = 24.0
    ) -> None: ...


def test_a_pipeline_gets_what_it_takes() -> None:
    asked = Request(kind="image", prompt="a fox", seed=1, width=64, extra_args={"eta": 1.0})
    assert pipeline_arguments(Painter(), asked, {"height": 32, "width": 32, "num_frames": 5}) == {
        "prompt": "a fox",
        "width": 64,
        "height": 32,
        "eta": 1.0,
    }
    assert pipeline_arguments(Filmer(), Request(kind="image", prompt="a fox", seed=1), {"num_frames": 17}) == {
        "prompt": "a fox",
        "num_frames": 1,
    }
    asked = Request(kind="video", prompt="a fox", seed=1, fps=8)
    assert pipeline_arguments(Filmer(), asked, {"num_frames": 17}) == {"prompt": "a fox", "num_frames": 17, "fps": 8}


@pytest.mark.parametrize(
    "asked, said",
    [
        (Request("video", "a fox", 1), "'Painter' makes pictures only"),
        (Request("image", "a fox", 1, guidance_scale=2.0), "'Painter' does not take 'guidance_scale'"),
        (Request("image", "a fox", 1, extra_args={"unknown": 1}), "does not take 'unknown'"),
        (Request("image", "a fox", 1, extra_args={"image": "/etc/passwd"}), "'image' of 'Painter' is not a scalar"),
        (Request("image", "a fox", 1, extra_args={"anything": "/etc/passwd"}), "'anything' of 'Painter' is not a sc"),
        (Request("image", "a fox", 1, extra_args={"sigmas": 1}), "'sigmas' of 'Painter' is not a scalar"),
    ],
    ids=("video", "field", "unknown", "image", "untyped", "list"),
)
def test_a_pipeline_is_not_given_what_it_does_not_take(asked: Request, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pipeline_arguments(Painter(), asked, {})


def test_extra_arguments_are_copied() -> None:
    given = {"eta": 1, "flag": True, "word": "fast", "nothing": None}
    assert check_extra(given) == given and check_extra(given) is not given


def test_pictures_are_found_in_the_outputs_of_pipelines() -> None:
    frames = [Image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    for output in ({"images": frames}, {"frames": [frames]}, {"video": frames}, {"images": None, "frames": [frames]}):
        assert pictures_of(output) == frames
    for empty in ({}, {"images": []}, {"images": [None]}):
        with pytest.raises(ValueError, match="returned no pictures"):
            pictures_of(empty)


def test_a_wave_is_of_equal_requests() -> None:
    first = Request("image", "a fox", 1, num_inference_steps=4, extra_args={"eta": 1, "word": "fast"})
    equal = replace(first, prompt="a boat", seed=2, width=64, extra_args={"word": "fast", "eta": 1})
    assert differences([first, equal, first]) == {}
    slower, other = replace(first, num_inference_steps=5), replace(first, extra_args=None)
    refused = differences([first, slower, equal, other])
    assert list(refused) == [1, 3]
    assert "'num_inference_steps' must be the same in every request, got 4 in requests [0]; 5 in" in refused[1]
    assert "'extra_args' must be the same" in refused[3] and refused[3].endswith("or ask a server without --wave.")
    assert list(differences([replace(first, num_inference_steps=None), first])) == [0, 1]
