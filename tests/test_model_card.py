# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
`diffusers-dlo card`: its section and tags come into a model card, and every other byte of it stays.
"""

import errno
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from diffusers_dlo.byte_size import format_bytes
from diffusers_dlo.card_metadata import add_metadata
from diffusers_dlo.cli import main
from diffusers_dlo.model_card import BEGIN, END, TAG
from tests import zoo


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import tiny_checkpoints  # noqa: E402


BODY = "# A model\n\nIt draws *foxes*.  \n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('---')\n```\n"
HEAD = "---\n# kept\nlicense:   mit   # odd spacing\nlanguage: [en,  'de']\ntags:\n  - text-to-video # first\n---\n"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("wan", "flux"):
        getattr(tiny_checkpoints, f"build_tiny_{name}")(folder / name)
    main(["plan", str(folder / "wan"), "--ranks", "3", "--device-memory", "64MiB", "--json", str(folder / "wan.json")])
    main(["plan", str(folder / "flux"), "--json", str(folder / "flux.json")])
    return folder


@pytest.fixture
def wan(checkpoints: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own, of links to the files of another: headers are all that is read."""
    shutil.copytree(checkpoints / "wan", tmp_path / "wan", copy_function=os.link)
    return tmp_path / "wan"


def card(folder: Path, *arguments: object) -> bytes:
    assert main(["card", str(folder), *map(str, arguments)]) == 0
    return (folder / "README.md").read_bytes()


def fails(capsys: pytest.CaptureFixture, folder: object, *arguments: object) -> str:
    capsys.readouterr()
    assert main(["card", str(folder), *map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("diffusers-dlo: error: ") and "Traceback" not in captured.err and not captured.out
    return captured.err


def table_of(text: str) -> list[list[str]]:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return rows[2:]


# The section


def test_a_checkpoint_without_a_card_gets_one(wan: Path, capsys: pytest.CaptureFixture) -> None:
    text = card(wan).decode()
    assert f"'{wan / 'README.md'}' is written." in capsys.readouterr().out
    loaded = ModelCard(text)
    assert loaded.data.to_dict() == {"library_name": "diffusers", "tags": ["diffusers", TAG]}
    assert loaded.text.startswith(f"\n# wan\n\n{BEGIN}\n") and loaded.text.endswith(f"\n{END}\n")
    assert str(wan) not in text and "accelerate launch --num_processes 2 " in text
    assert main(["plan", str(wan), "--json", str(wan / "plan.json")]) == 0
    expected = [
        [
            str(scale["devices"]),
            f"`{scale['transfer']}`",
            format_bytes(scale["device_memory"]["total"]),
            format_bytes(scale["host_weights_bytes"]),
        ]
        for scale in json.loads((wan / "plan.json").read_text())["simulated"][:4]
    ]
    assert [row[0] for row in expected] == ["1", "2", "4", "8"] and [row[:4] for row in table_of(text)] == expected
    assert all(float(row[4].removesuffix(" ms")) > 0 for row in table_of(text))
    assert "not measured" in text and "55 GB/s from the host to each device, 270 GB/s between devices" in text
    assert "4,096 tokens" in text and "500 TFLOP/s" in text and "Planned for" not in text
    assert not [name for name in os.listdir(wan) if name.startswith(".")]
    assert (wan / "README.md").stat().st_mode & 0o777 == 0o644


def test_its_code_runs(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", card(wan).decode(), re.DOTALL)
    assert "mapped_loading" not in code
    monkeypatch.chdir(wan.parent)
    names: dict[str, object] = {}
    exec(code, names)
    pipe = names["pipe"]
    assert pipe.distributed_layerwise_offload.report().host_kind == "mapped"
    pipe.disable_distributed_layerwise_offload()


def test_other_checkpoints_name_other_code(tmp_path: Path) -> None:
    zoo.build("flux", 2).save_pretrained(tmp_path / "flux")
    text = card(tmp_path / "flux", "--name", "someone/flux").decode()
    assert 'model = FluxTransformer2DModel.from_pretrained("someone/flux", dtype=torch.float32)' in text
    assert "model.enable_distributed_layerwise_offload()" in text and "# someone/flux\n" in text
    zoo.build("t5", 2).to(torch.bfloat16).save_pretrained(tmp_path / "t5")
    loaded = ModelCard(card(tmp_path / "t5").decode())
    assert loaded.data.library_name == "transformers" and loaded.data.tags == ["transformers", TAG]
    assert "from transformers import T5EncoderModel" in loaded.text
    assert "diffusers_dlo.apply_distributed_layerwise_offload(model)" in loaded.text


def test_figures_of_a_plan(wan: Path, checkpoints: Path) -> None:
    plan = json.loads((checkpoints / "wan.json").read_text())
    rows = table_of(card(wan, "--plan", checkpoints / "wan.json").decode())
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "8"]
    best = plan["options"][plan["recommended"]]
    assert rows[2][-3:-1] == [format_bytes(best["device_memory"]["total"]), format_bytes(best["host_weights_bytes"])]
    plan["assumed"].update(h2d_bytes_per_second=12.5e9, compute="given")
    for scale in plan["simulated"]:
        scale.update(device_budget=3 << 20, seconds=0.25)
    (wan.parent / "plan.json").write_text(json.dumps(plan))
    text = card(wan, "--plan", wan.parent / "plan.json").decode()
    assert all(row[2] == '`"3MiB"`' and row[5] == "250 ms" for row in table_of(text) if row[0] != "3")
    assert "12.5 GB/s from the host" in text and "Planned for devices with 64 MiB each." in text
    assert "Computing is as it was measured before" in text


def test_a_plan_of_chosen_components_or_another_dtype(wan: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    main(["plan", str(wan), "--components", "transformer", "--dtype", "float32", "--json", str(plan)])
    text = card(wan, "--plan", plan).decode()
    assert 'components=["transformer"]' in text and "with diffusers_dlo.mapped_loading():" in text
    assert "dtype=torch.float32" in text


# What stays


def test_everything_else_stays(wan: Path, capsys: pytest.CaptureFixture) -> None:
    path = wan / "README.md"
    path.write_text(HEAD + BODY)
    path.chmod(0o640)
    content = card(wan).decode()
    head = HEAD.replace("# first\n", f"# first\n  - diffusers\n  - {TAG}\nlibrary_name: diffusers\n")
    assert content.startswith(head + BODY + "\n" + BEGIN + "\n") and content.endswith("\n" + END + "\n")
    assert content.count(BEGIN) == 1 and path.stat().st_mode & 0o777 == 0o640
    assert ModelCard(content).data.tags == ["text-to-video", "diffusers", TAG]
    before = path.stat()
    assert card(wan) == content.encode() and "up to date" in capsys.readouterr().out
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    # What the user writes around the section stays, and what is in it is renewed in its place.
    moved = content.replace("## Distributed", "## Changed").replace(BODY, "above\r\n") + "below, without an end"
    path.write_bytes(moved.encode())
    section = content[content.index(BEGIN) :]
    assert card(wan).decode() == head + "above\r\n\n" + section + "below, without an end"


@pytest.mark.parametrize(
    "body",
    (
        pytest.param("", id="empty", marks=pytest.mark.slow),
        pytest.param("no line break", id="none"),
        pytest.param("one\n", id="one", marks=pytest.mark.slow),
        pytest.param("two\n\n", id="two"),
    ),
)
def test_a_second_run_changes_nothing(body: str, wan: Path) -> None:
    (wan / "README.md").write_text(body)
    first = card(wan)
    gap = {"": "", "no line break": "\n\n", "one\n": "\n", "two\n\n": ""}[body]
    assert ModelCard(first.decode()).text.startswith(f"{body}{gap}{BEGIN}\n")
    assert card(wan) == first and first.count(BEGIN.encode()) == 1


@pytest.mark.parametrize("newline", ("\n", pytest.param("\r\n", marks=pytest.mark.slow)), ids=("unix", "windows"))
def test_marks_in_code_are_only_shown(newline: str, wan: Path) -> None:
    shown = f"{BEGIN}\nnot ours\n{END}\n"
    body = f"# How\n\n```html\n{shown}```\n\n  ~~~~ md\n```\n~~~\n{shown}   ~~~~~ \n`````` not a fence `\n"
    body = body.replace("\n", newline)
    (wan / "README.md").write_bytes(body.encode())
    first = card(wan)
    begin, end = f"{newline}{BEGIN}{newline}".encode(), f"{newline}{END}{newline}".encode()
    assert body.encode() in first and first.count(begin) == 3 and first.endswith(end) and card(wan) == first


def test_windows_line_breaks_and_a_byte_order_mark_stay(wan: Path) -> None:
    original = b"\xef\xbb\xbf" + (HEAD + BODY).replace("\n", "\r\n").encode()
    (wan / "README.md").write_bytes(original)
    content = card(wan)
    assert content.startswith(b"\xef\xbb\xbf---\r\n# kept\r\n") and b"\n" not in content.replace(b"\r\n", b"")
    assert content.index(BODY.replace("\n", "\r\n").encode()) > 0 and card(wan) == content
    assert ModelCard.load(wan / "README.md").data.tags == ["text-to-video", "diffusers", TAG]


def test_a_dry_run_prints_what_would_be_written(wan: Path, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    assert main(["card", str(wan), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert not (wan / "README.md").exists()
    assert card(wan).decode() == out


METADATA = {
    "nothing": ("", "tags:\n- diffusers\n- dlo\nlibrary_name: diffusers"),
    "other": ("license: mit", "license: mit\ntags:\n- diffusers\n- dlo\nlibrary_name: diffusers"),
    "indented": ("  license: mit", "  license: mit\n  tags:\n  - diffusers\n  - dlo\n  library_name: diffusers"),
    "some": ("tags:\n- dlo\n- x\nlibrary_name: timm", "tags:\n- dlo\n- x\n- diffusers\nlibrary_name: timm"),
    "flow": ("tags: [x, y,]  # c\nlibrary_name: a", "tags: [x, y, diffusers, dlo,]  # c\nlibrary_name: a"),
    "empty_flow": ("tags: [ ]\nlibrary_name: a", "tags: [ diffusers, dlo]\nlibrary_name: a"),
    "null": ("tags:   # c\nlibrary_name: a", "tags: [diffusers, dlo]   # c\nlibrary_name: a"),
    "tilde": ("tags: ~\nlibrary_name: a", "tags: [diffusers, dlo]\nlibrary_name: a"),
    "single": ("tags: x\nlibrary_name: a", "tags: [x, diffusers, dlo]\nlibrary_name: a"),
    "quoted": ("tags:\n    -   'x # y' # c\nlibrary_name: a",
               "tags:\n    -   'x # y' # c\n    -   diffusers\n    -   dlo\nlibrary_name: a"),
    "text_at_the_end": ("a: |\n  text", "a: |\n  text\ntags:\n- diffusers\n- dlo\nlibrary_name: diffusers"),
    "complete": ("library_name: a\ntags: [dlo,diffusers]", "library_name: a\ntags: [dlo,diffusers]"),
    "twice": ("tags: [a]\ntags: [b]\nlibrary_name: a", "tags: [a]\ntags: [b, diffusers, dlo]\nlibrary_name: a"),
}  # fmt: skip


def test_metadata_without_a_line_gets_some() -> None:
    for newline in ("\n", "\r\n"):
        before, after = (text.replace("\n", newline) for text in ("---\n---\n# T", "---\n%s\n---\n# T"))
        inserted = METADATA["nothing"][1].replace("\n", newline)
        assert add_metadata(before, ("diffusers", "dlo"), "diffusers", newline) == after % inserted


@pytest.mark.parametrize("name", METADATA)
def test_tags_are_inserted(name: str) -> None:
    before, after = METADATA[name]
    for newline in ("\n", "\r\n"):
        cards = [f"---\n{block}\n---\n\nText\n".replace("\n", newline) for block in (before, after)]
        assert add_metadata(cards[0], ("diffusers", "dlo"), "diffusers", newline) == cards[1]
        assert add_metadata(cards[1], ("diffusers", "dlo"), "diffusers", newline) == cards[1]


@pytest.mark.parametrize(
    "block,said",
    (
        ("{license: mit}", "nothing can be inserted. Give it these by hand"),
        ("x: &t [a]\ntags: *t", "tags: [a, diffusers, dlo], library_name: diffusers"),
        ("tags: a, b", "tags: [a, b, diffusers, dlo]"),
        ("tags: {a: b}", "no list of names, but {'a': 'b'}"),
        ("tags: [a", "is not YAML"),
        ("- a\n- b", "is not a mapping"),
        ("date: 2026-02-31", "is not YAML"),
        ("x: " + "[" * 5000, "is not YAML"),
        ("x: &x {tags: [a]}\n<<: *x", "tags: [a, diffusers, dlo], library_name: diffusers"),
    ),
    ids=("flow", "alias", "commas", "mapping", "open", "list", "date", "deep", "merge"),
)
def test_other_metadata_is_refused(block: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        add_metadata(f"---\n{block}\n---\n", ("diffusers", "dlo"), "diffusers", "\n")


def test_whatever_is_accepted_stays() -> None:
    """Random metadata: with what was inserted taken out again, the card is the one before."""
    draw = random.Random(0)
    texts = ["mit", "'it''s'", "2024-01-01", "é", "# c", "", "|\n  text", ">-\n  a\n\n  b"]
    lists = ["[a, b]", "[]", "&a [u]", "{a: 1}", "\n- x\n- y # c", "\n    - 'y z'", "\n  n:\n  - k: v\n    w: [1]"]
    values = texts + lists
    accepted = 0
    for _ in range(300):
        keys = draw.sample(["license", "x", "tags", "library_name", "language", "# c"], draw.randint(0, 5))
        lines = "".join(f"{key}: {draw.choice(values)}\n" for key in keys)
        newline = draw.choice(("\n", "\r\n"))
        before = f"---\n{lines}---\n{draw.choice(('', '# T', '---'))}".replace("\n", newline)
        try:
            after = add_metadata(before, ("diffusers", "dlo"), "diffusers", newline)
        except ValueError:
            continue
        accepted += 1
        rest = iter(after)
        assert all(character in rest for character in before), (before, after)
        assert newline == "\n" or "\n" not in after.replace(newline, "")
        assert add_metadata(after, ("diffusers", "dlo"), "diffusers", newline) == after
        assert ModelCard(after).data.tags[-1] == "dlo"
    assert accepted > 200


# Refusals: the card is what it was


def test_cards_that_are_refused(wan: Path, capsys: pytest.CaptureFixture) -> None:
    path = wan / "README.md"
    cases: dict[str, tuple[bytes, tuple[str, ...]]] = {
        "begin": (f"{BEGIN}\ntext\n".encode(), ("1 lines begin it and 0 end it", "Remove these lines")),
        "end": (f"text\n{END}\n".encode(), ("0 lines begin it and 1 end it",)),
        "order": (f"{END}\n{BEGIN}\n".encode(), ("marks of the section are damaged",)),
        "two": (f"{BEGIN}\n{END}\n{BEGIN}\n{END}\n".encode(), ("2 lines begin it and 2 end it",)),
        "encoding": (b"# caf\xe9\n", ("is not UTF-8 (byte 5", "Convert it first")),
        "open": (b"---\nlicense: mit\n# text\n", ("no other such line ends its metadata",)),
        "names": (b"---\n1: a\n---\n", (str(path),)),
        "code": (b"~~~\n```\n~~~\ntext\n````md\n```\n", ("block of code that begins with '````md'", "End it")),
    }
    for content, said in cases.values():
        path.write_bytes(content)
        line = fails(capsys, wan)
        assert str(path) in line and all(word in line for word in said), line
        assert path.read_bytes() == content and len([n for n in os.listdir(wan) if "README" in n]) == 1
    path.write_text(f"A line that only speaks of {BEGIN} is no mark.\n")
    assert card(wan).decode().count(BEGIN) == 2


def test_a_link_is_followed_inside_the_directory_only(wan: Path, capsys: pytest.CaptureFixture) -> None:
    outside, path = wan.parent / "blob", wan / "README.md"
    outside.write_text("theirs\n")
    path.symlink_to("../blob")
    assert "is a link to '../blob'" in fails(capsys, wan) and outside.read_text() == "theirs\n"
    path.unlink()
    path.symlink_to("nowhere")
    assert "is no file inside the directory" in fails(capsys, wan) and not (wan / "nowhere").exists()
    path.unlink()
    (wan / "card.md").write_text("ours\n")
    path.symlink_to("card.md")
    assert BEGIN.encode() in card(wan) and path.is_symlink() and BEGIN in (wan / "card.md").read_text()
    path.unlink()
    path.mkdir()
    assert "is no file, so it holds no model card" in fails(capsys, wan)


def test_what_is_no_checkpoint(wan: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not a directory" in fails(capsys, tmp_path / "nowhere")
    assert "is not a directory" in fails(capsys, wan / "model_index.json")
    assert "neither a model_index.json nor a config.json" in fails(capsys, tmp_path / "empty")
    assert not os.listdir(tmp_path / "empty")


def change(*path: object, to: object) -> Callable[[dict], None]:
    def apply(values: dict) -> None:
        for key in path[:-1]:
            values = values[key]
        values[path[-1]] = to

    return apply


def test_plans_that_are_refused(wan: Path, checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    plan = wan.parent / "plan.json"
    line = fails(capsys, wan, "--plan", checkpoints / "flux.json")
    assert "is a plan of another model than the 'WanPipeline'" in line and "diffusers-dlo plan" in line
    assert "cannot be read (No such file" in fails(capsys, wan, "--plan", wan / "nowhere.json")
    texts = (("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "holds a list"), ("{}", "'simulated'"))
    for text, said in texts:
        plan.write_text(text)
        assert said in fails(capsys, wan, "--plan", plan)
    for edit, said in (
        (change("class", to="WanImageToVideoPipeline"), "it is of a 'WanImageToVideoPipeline'"),
        (change("components", 1, "streamed_bytes", to=5), "another model than the 'WanPipeline'"),
        (change("components", 0, "name", to="unet"), "another model"),
        (change("dtype", to="save"), "no dtype"),
        (change("simulated", 0, "seconds", to=float("nan")), "no amount: nan"),
        (change("simulated", 0, "transfer", to="| x"), "no transfer"),
        (change("simulated", 0, "device_memory", "total", to="much"), "no whole number: 'much'"),
        (change("recommended", to=99), "IndexError"),
        (change("device_bytes", to=10**400), "no whole number: 1000"),
        (change("assumed", "tflops", to=10**400), "no amount: 1000"),
    ):
        values = json.loads((checkpoints / "wan.json").read_text())
        edit(values)
        plan.write_text(json.dumps(values))
        line = fails(capsys, wan, "--plan", plan)
        assert said in line and str(plan) in line, line
    assert main(["plan", str(wan), "--device-memory", "1MiB", "--json", str(plan)]) == 1
    assert "says that the model does not fit" in fails(capsys, wan, "--plan", plan)
    assert not (wan / "README.md").exists()


def test_a_card_that_cannot_be_written_stays(
    wan: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = wan / "README.md"
    path.write_text(BODY)

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    names = sorted(os.listdir(wan))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        assert "cannot be written (No space left on device); it is what it was" in fails(capsys, wan)
        patch.setattr(os, "fsync", interrupt)
        assert main(["card", str(wan)]) == 130
    assert path.read_text() == BODY and sorted(os.listdir(wan)) == names
