# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
Every block of Python and of bash in the README and the documentation runs, with tiny checkpoints for large ones.

Each page has a preamble below: what its blocks take as given, and the few words of it that are replaced. The blocks of
a page run in order, in one namespace; what one leaves offloaded is taken off before the next.
"""

from __future__ import annotations

import configparser
import contextlib
import io
import json
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, WanTransformer3DModel
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch import nn

import diffusers_dlo
from diffusers_dlo.cli import main
from diffusers_dlo.concurrency import WaveExecutor
from diffusers_dlo.pack import pack_checkpoint
from tests import toys
from tests.code_blocks import PAGES, ROOT, Block, blocks_of, commands, program_of
from tests.ranks import run_ranks


sys.path.insert(0, str(ROOT / "examples"))
import tiny_checkpoints


BF16 = torch.bfloat16
LANGUAGES = {"python", "bash", "", "json", "yaml", "ini", "dockerfile", "text"}
PROMPTS = ["a red fox runs through fresh snow", "a paper boat drifts down a rainy street"]
WAN = {"height": 16, "width": 16, "num_frames": 5, "num_inference_steps": 2}

# Blocks of these pages, and commands of these programs on any page, are run by other tests, which read them from
# `code_blocks.py` too: a test file has to name the page, or the program and the page.
PAGES_OF_OTHERS = ("docs/serve.md", "docs/deploy.md")
PROGRAMS_OF_OTHERS = ("curl", "diffusers-dlo serve")
SCRIPTS_OF_OTHERS = ("examples/check_npu.py",)


# What stands in for what is large


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny checkpoints, `wan` and `flux`."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoints.build_tiny_wan(folder / "wan")
    tiny_checkpoints.build_tiny_flux(folder / "flux")
    return folder


def load_flux(tiny: Path) -> DiffusionPipeline:
    """A pipeline whose pictures are small unless told otherwise."""
    pipe = DiffusionPipeline.from_pretrained(tiny / "flux", dtype=BF16)
    pipe.default_sample_size = 4
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_transformer(tiny: Path) -> nn.Module:
    return WanTransformer3DModel.from_pretrained(tiny / "wan" / "transformer", dtype=BF16)


def rename(tiny: Path) -> None:
    """Writes the transformer under names that are not the model's own."""
    state = {f"model.diffusion_model.{name}": tensor for name, tensor in load_transformer(tiny).state_dict().items()}
    save_file(state, tiny / "renamed.safetensors")


def pack_coded(tiny: Path) -> None:
    pack_checkpoint(str(tiny / "flux"), str(tiny / "flux-coded"), BF16, codec="zstd", ranks=2)


@dataclass(frozen=True)
class Preamble:
    """
    What the Python blocks of a page take as given, by name; what is replaced in them, and by what, where `TINY` is the
    folder of the tiny checkpoints; what has to be true of the names after the last block.
    """

    given: Callable[[Path], dict[str, Any]] = lambda tiny: {}
    replaced: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[dict[str, Any]], bool] = lambda names: True


def is_video(frames: Any) -> bool:
    return np.asarray(frames).shape == (5, 16, 16, 3)


PREAMBLES = {
    "README.md": Preamble(
        lambda tiny: {
            "my_module": toys.Stack(3),
            "prompts": PROMPTS,
            "requests": [{"prompt": prompt, **WAN} for prompt in PROMPTS],
            "small": WAN,
        },
        {
            '"Wan-AI/Wan2.2-T2V-A14B-Diffusers"': '"TINY/wan"',
            'pipe(prompt="a paper': 'pipe(**small, prompt="a paper',
            "pipe(prompt=prompt)": "pipe(**small, prompt=prompt)",
            'blocks=["layers"]': 'blocks=["blocks"]',
        },
        lambda names: all(map(is_video, (names["frames"], *(one.frames[0] for one in names["results"])))),
    ),
    "docs/checkpoints.md": Preamble(
        replaced={
            '"Wan-AI/Wan2.1-T2V-14B-Diffusers"': '"TINY/wan"',
            '"/data/weights"': '"weights"',
            "num_layers=30, num_attention_heads=12, ffn_dim=8960": "**dict(WanTransformer3DModel.load_config("
            '"TINY/wan/transformer"))',
            '"path/to/checkpoint"': '"TINY/renamed.safetensors"',
        },
        check=lambda names: torch.equal(names["value"], names["reference"].blocks[0].attn1.to_q.weight),
        given=lambda tiny: {"reference": load_transformer(tiny), "_": rename(tiny)},
    ),
    "docs/coded.md": Preamble(
        lambda tiny: {"_": pack_coded(tiny)},
        {'"flux-coded"': '"TINY/flux-coded"'},
        lambda names: names["handle"].report().host_kind == "coded",
    ),
    "docs/concurrency.md": Preamble(
        lambda tiny: {"pipe": load_flux(tiny), "prompts": PROMPTS, "saved": (saved := []), "save": saved.append},
        {"pipe(prompt=prompt)": "pipe(prompt=prompt, num_inference_steps=2)", 'steps": 30': 'steps": 2'},
        lambda names: [one.images[0].size for one in names["saved"] + names["results"]] == [(32, 32)] * 4,
    ),
    "docs/device_budget.md": Preamble(
        replaced={'"black-forest-labs/FLUX.1-dev"': '"TINY/flux"'},
        check=lambda names: names["handle"].plan.device_budget == 40 << 30,
    ),
    "docs/memory.md": Preamble(check=lambda names: (names["plan"].group_size, names["plan"].num_slots) == (4, 2)),
    "docs/planning.md": Preamble(
        lambda tiny: {"model": load_transformer(tiny)},
        check=lambda names: names["prediction"].best.plan.group_size == 2 and not names["prediction"].shortfalls,
    ),
    "docs/report.md": Preamble(
        lambda tiny: {"pipe": load_flux(tiny), "prompt": PROMPTS[0]},
        check=lambda names: (
            names["report"].passes == 5
            and Path("pass.svg").read_text().lstrip().startswith("<?xml")
            and len(json.loads(Path("trace.json").read_text())["traceEvents"]) > 100
        ),
    ),
    "docs/troubleshooting.md": Preamble(
        lambda tiny: {"model": load_transformer(tiny)},
        check=lambda names: (
            logging.getLogger("diffusers_dlo").level == logging.INFO
            and all(parameter.data_ptr() % 64 == 0 for parameter in names["model"].parameters())
        ),
    ),
}

# Python blocks that other tests of this file run: by page, the words that tell them.
ELSEWHERE = {
    "docs/concurrency.md": ("WaveExecutor(", "def build(", "conversation.tell(", "executor.submit("),
    "docs/ranks.md": ("init_device_mesh(",),
}


def python_blocks(page: str) -> list[Block]:
    """Those that the page's own test runs."""
    blocks = [block for block in blocks_of(page) if block.language == "python" and not block.reason]
    return [block for block in blocks if not any(words in block.text for words in ELSEWHERE.get(page, ()))]


def code_of(block: Block, replaced: Mapping[str, str], tiny: Path) -> str:
    text = block.text
    for words, others in replaced.items():
        text = text.replace(words, others.replace("TINY", str(tiny)))
    return text


def take_off(names: Mapping[str, Any]) -> None:
    """Takes the offload off whatever a block has enabled."""
    for value in list(names.values()):
        for one in (value, *(value.components.values() if isinstance(value, DiffusionPipeline) else ())):
            if isinstance(one, DiffusionPipeline):
                one.disable_distributed_layerwise_offload()
            elif isinstance(one, nn.Module) and diffusers_dlo.is_distributed_layerwise_offload_enabled(one):
                diffusers_dlo.remove_distributed_layerwise_offload(one)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory, and loggers that are afterwards what they were."""
    monkeypatch.chdir(tmp_path)
    levels = {name: logging.getLogger(name).level for name in (None, "diffusers_dlo")}
    yield tmp_path
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


# Python


@pytest.mark.parametrize("page", PREAMBLES)
def test_python_blocks_run(page: str, tiny: Path, workplace: Path) -> None:
    preamble = PREAMBLES[page]
    names: dict[str, Any] = preamble.given(tiny)
    unused = set(preamble.replaced)
    blocks, compared = python_blocks(page), []
    assert blocks
    for block in blocks:
        code = code_of(block, preamble.replaced, tiny)
        unused -= {words for words in unused if words in block.text}
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, block.place, "exec"), names)
        except Exception as error:
            raise AssertionError(f"{block.place} fails, {type(error).__name__}: {error}\n{code}") from error
        finally:
            take_off(names)
        if block.text.endswith("\nprint(plan_distributed_layerwise_offload(model, group_size=4))\n"):
            shown = blocks_of(page)[blocks_of(page).index(block) + 1]
            assert shown.language == "" and printed.getvalue() == shown.text, f"{block.place} prints something else"
            compared.append(page)
    assert compared == [page] * (page == "README.md")
    assert not unused, f"{page} no longer says {unused}"
    assert preamble.check(names), f"{page}: its blocks run, and do not do what they say"


def run_mesh_block(rank: int, size: int, folder: str) -> tuple[int, bool]:
    """The block about meshes, on a rank."""
    (block,) = [block for block in blocks_of("docs/ranks.md") if "init_device_mesh(" in block.text]
    tiny = Path(folder)
    names: dict[str, Any] = {"pipe": load_flux(tiny)}
    exec(code_of(block, {'"cuda"': '"cpu"'}, tiny), names)
    pipe = names["pipe"]
    found = pipe.distributed_layerwise_offload.plan.group_size
    picture = np.asarray(pipe(PROMPTS[0], num_inference_steps=1).images[0])
    pipe.disable_distributed_layerwise_offload()
    return found, picture.shape == (32, 32, 3)


@pytest.mark.slow
def test_the_block_about_meshes_runs_on_eight_ranks(tiny: Path) -> None:
    assert run_ranks(8, run_mesh_block, str(tiny), timeout=250) == [(4, True)] * 8


@pytest.mark.slow
def test_the_blocks_about_an_executor_run(tiny: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {words: block for block in blocks_of("docs/concurrency.md") for words in ELSEWHERE["docs/concurrency.md"]
              if words in block.text}  # fmt: skip
    (workplace / "my_package").mkdir()
    (workplace / "my_package" / "__init__.py").write_text("")
    rank = blocks["def build("].text
    (workplace / "my_package" / "rank.py").write_text(rank)
    telling = blocks["conversation.tell("].text.replace("class Rank:", "class Telling(Rank):")
    build = "def build_telling(model):\n    return Telling(model)\n"
    (workplace / "my_package" / "telling.py").write_text(f"{rank}\n\n{telling}\n\n{build}")
    monkeypatch.syspath_prepend(workplace)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(workplace), str(ROOT)]))
    request = {"height": 32, "width": 32, "num_inference_steps": 1}
    names: dict[str, Any] = {f"request_{i}": {"prompt": PROMPTS[i % 2], **request} for i in range(3)}
    exec(code_of(blocks["WaveExecutor("], {'"..."': '"TINY/flux"'}, tiny), names)
    shapes = [np.asarray(names[name]).shape for name in ("first", "second", "third")]
    assert shapes == [(1, 32, 32, 3)] * 3
    assert not np.array_equal(names["first"], names["second"])
    notes: list[Any] = []
    target = "my_package.telling:build_telling"
    with WaveExecutor(target, num_workers=2, args={"model": str(tiny / "flux")}) as executor:
        names = {"executor": executor, "request": {"prompt": PROMPTS[0], **request}, "print": notes.append}
        exec(code_of(blocks["executor.submit("], {}, tiny), names)
    assert np.asarray(names["images"]).shape == (1, 32, 32, 3) and notes == [{"step": 1}]


# Bash


def own_commands(page: str) -> list[list[str]]:
    """The commands of the package on a page, but for those that other tests run."""
    others = [words for program in PROGRAMS_OF_OTHERS for words in commands(page, program)]
    return [words for words in commands(page, "diffusers-dlo") if words not in others]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in PAGES_OF_OTHERS and own_commands(page)])
def test_commands_of_the_package_run(
    page: str, tiny: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, since starting Python takes longer than most of them."""
    stand_ins = {
        "PATH_OR_NAME": str(tiny / "flux"),
        "MODEL_DIR": str(tiny / "flux"),
        "Wan-AI/Wan2.1-T2V-14B-Diffusers": str(tiny / "wan"),
        "black-forest-labs/FLUX.1-dev": str(tiny / "flux"),
        "ans": "zstd",  # what the CPU decodes
    }
    for words in own_commands(page):
        assert main([stand_ins.get(word, word) for word in words[1:]]) == 0, (page, words, capsys.readouterr().err)
    if page == "docs/checkpoints.md":
        pipe = DiffusionPipeline.from_pretrained("wan-bf16", dtype=BF16)
        handle = pipe.enable_distributed_layerwise_offload()
        assert handle.report().host_kind == "mapped"
        handle.remove()
    if page == "docs/coded.md":
        again = load_file("flux-plain/transformer/diffusion_pytorch_model.safetensors")
        state = load_flux(tiny).transformer.state_dict()
        assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)
    if page == "docs/model_cards.md":
        assert "distributed-layerwise-offload" in ModelCard.load(tiny / "flux" / "README.md").data.tags
        (tiny / "flux" / "README.md").unlink()


def test_other_commands_name_what_is_there() -> None:
    """Scripts and extras; the commands themselves are run among the slow tests, and by the tests of the examples."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    extras = set(parser["options.extras_require"])
    count = 0
    for page in [page for page in PAGES if page not in PAGES_OF_OTHERS]:
        for words in commands(page):
            program, *arguments = program_of(words)
            count += 1
            if program == "pip":
                (wanted,) = [word for word in arguments if not word.startswith("-") and word != "install"]
                match = re.fullmatch(r"\.\[([a-z,]+)\]", wanted)
                assert match is not None and set(match[1].split(",")) <= extras, (page, words)
            elif program in ("python", "torchrun", "accelerate"):
                scripts = [word for word in arguments if word.endswith(".py")]
                assert len(scripts) == 1 and (scripts[0] == "my_script.py" or (ROOT / scripts[0]).is_file()), words
            else:
                assert program in ("diffusers-dlo", "curl"), f"{page}: nothing runs '{shlex.join(words)}'"
    assert count > 10


LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
}


def launch_lines() -> dict[str, list[str]]:
    """The different commands that start scripts, by page and number; eight ranks are two here."""
    lines: dict[str, list[str]] = {}
    for page in [page for page in PAGES if page not in PAGES_OF_OTHERS]:
        started = [words for words in commands(page) if program_of(words)[0] in LAUNCHERS]
        started = [words for words in started if not set(words) & set(SCRIPTS_OF_OTHERS)]
        for number, words in enumerate(started):
            line = ["2" if word == "8" else word for word in program_of(words)]
            if line not in lines.values():
                lines[f"{Path(page).stem}_{number}"] = line
    return lines


@pytest.fixture(scope="module")
def started_from(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """A directory that has the examples, and as `my_script.py` the README's block about several ranks."""
    folder = tmp_path_factory.mktemp("started")
    (folder / "examples").symlink_to(ROOT / "examples")
    (block,) = [block for block in python_blocks("README.md") if "split_between_processes" in block.text]
    preamble = PREAMBLES["README.md"]
    given = f"""
import torch.distributed as dist
from diffusers import DiffusionPipeline

import diffusers_dlo

small, prompts = {WAN!r}, {PROMPTS!r}
pipe = DiffusionPipeline.from_pretrained("{tiny}/wan")
"""
    shown = "print(f'{len(mine)} prompts of {dist.get_world_size() if dist.is_initialized() else 1} ranks')\n"
    code = given + code_of(block, preamble.replaced, tiny) + shown
    (folder / "my_script.py").write_text(code)
    return folder


EVERY_DAY = ["torchrun", "--nproc_per_node", "2", "my_script.py"]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (line != EVERY_DAY)) for name, line in launch_lines().items()],
)
def test_launch_lines_run(name: str, started_from: Path) -> None:
    program, *arguments = launch_lines()[name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PET_MASTER_PORT"] = free_port()  # torchrun's option: several such jobs run at a time
    command = [*LAUNCHERS[program], *arguments]
    done = subprocess.run(command, cwd=started_from, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    if "my_script.py" in arguments:
        alone = program == "accelerate" and "--multi_gpu" not in arguments  # on the CPU it then starts one process
        assert done.stdout.count("prompts of 1 ranks" if alone else "1 prompts of 2 ranks") == (1 if alone else 2)
    else:
        assert "Offload report of this rank" in done.stdout


# That nothing is left out


def test_every_block_is_run_or_marked() -> None:
    run, marked = 0, []
    for page in PAGES:
        blocks = blocks_of(page)
        assert {block.language for block in blocks} <= LANGUAGES, f"{page} has a block in a language nobody runs"
        if page in PAGES_OF_OTHERS:
            continue
        python = [block for block in blocks if block.language == "python" and not block.reason]
        own = python_blocks(page) if page in PREAMBLES else []
        told = [block for block in python if any(words in block.text for words in ELSEWHERE.get(page, ()))]
        assert len(told) == len(ELSEWHERE.get(page, ())), f"{page}: '{ELSEWHERE[page]}' no longer tell its blocks"
        assert python == sorted(own + told, key=lambda block: block.line), f"{page} has no preamble"
        run += len(python) + len([block for block in blocks if block.language == "bash" and not block.reason])
        marked += [block for block in blocks if block.reason]
    assert [block.page for block in marked] == ["README.md", "docs/benchmarks.md", "docs/npu.md", "docs/npu.md"]
    assert all(len(block.reason) > 15 and block.language == "bash" for block in marked)
    assert run >= 30


def test_a_reason_stands_for_a_block() -> None:
    """A mark that is before no block marks nothing."""
    for page in PAGES:
        marks = (ROOT / page).read_text().count("<!-- not run")
        assert marks == len([block for block in blocks_of(page) if block.reason]), page


def test_what_others_run_is_run() -> None:
    own = ("code_blocks.py", Path(__file__).name)
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.py") if path.name not in own]
    for page in PAGES:
        needed = [(f'"{page}"',)] if page in PAGES_OF_OTHERS else []
        needed += [(f'"{page}"', f'"{program}"') for program in PROGRAMS_OF_OTHERS if commands(page, program)]
        for words in needed:
            assert any(all(word in source for word in words) for source in sources), f"no test has {words}"
