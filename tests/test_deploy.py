# Copyright 2026 The diffusers_dlo team. Licensed under the Apache License, Version 2.0.
"""
What docs/deploy.md and the files beside it say, as far as it can be checked without a container engine, a proxy or a
cluster: command lines by the parsers that read them, the unit by systemd, and the names of extras, paths and files.
"""

from __future__ import annotations

import argparse
import configparser
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from fastapi.testclient import TestClient

from diffusers_dlo.cli import main
from diffusers_dlo.serve.app import make_app
from diffusers_dlo.serve.demo import build_tiny_cosmos3
from diffusers_dlo.serve.options import ServeOptions, add_arguments, read_options
from tests.code_blocks import ROOT, blocks_of, commands


sys.path.insert(0, str(ROOT / "examples"))
import ray_serve


DEPLOY = ROOT / "examples" / "deploy"
PAGE = "docs/deploy.md"
UNIT = DEPLOY / "diffusers-dlo.service"


def served(words: list[str]) -> argparse.Namespace:
    """The options of `diffusers-dlo serve`; an unknown one ends the test."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def extras() -> set[str]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return set(parser["options.extras_require"])


def test_the_commands_of_the_page_are_understood(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_tiny_cosmos3(tmp_path / "cosmos3")
    seen = set()
    for program, *words in commands(PAGE):
        seen.add((program, words[0]))
        if program == "pip":
            assert re.fullmatch(r"\.\[(\w+)\]", words[-1])[1] in extras()  # type: ignore[index]
        elif (program, words[0]) == ("diffusers-dlo", "plan"):
            assert main([str(model) if word == "PATH_OR_HUB_ID" else word for word in words]) == 0
            assert "8 ranks" in capsys.readouterr().out
        else:
            assert (program, words[0]) == ("python", "examples/ray_serve.py"), f"nothing runs '{program}'"
            found = ray_serve.parse(words[1:])
            assert (found.demo, found.replicas, found.ray_address) == (True, 2, None)
    assert seen == {("pip", "install"), ("diffusers-dlo", "plan"), ("python", "examples/ray_serve.py")}


def test_the_commands_that_are_not_run_name_what_is_there() -> None:
    marked = [block for block in blocks_of(PAGE) if block.reason]
    text = "\n".join(block.text for block in marked).replace("\\\n", " ")
    assert len(marked) == 3
    for name in re.findall(r"examples/[\w./-]+", text):
        assert (ROOT / name).is_file(), name
    (cluster,) = [shlex.split(line) for line in text.splitlines() if line.startswith("python examples/ray_serve.py")]
    found = ray_serve.parse(cluster[2:])
    assert (found.ray_address, found.replicas, found.ranks, found.host) == ("auto", 4, 8, "0.0.0.0")
    (run,) = [shlex.split(line) for line in text.splitlines() if line.startswith("podman run")]
    found = served(run[run.index("diffusers-dlo") + 1 :])
    assert (found.model, found.ranks) == ("/model", 8)
    assert {"/srv/models/model:/model:ro", "memlock=-1", "--init"} <= set(run)


def test_the_options_of_the_example_are_those_of_the_page() -> None:
    text = (ROOT / PAGE).read_text()
    rows = set(re.findall(r"^\| `(--[\w-]+)` \|", text, re.MULTILINE))
    own = {option for option in vars(ray_serve.parse([])) if option not in vars(served([]))}
    assert rows == {f"--{name.replace('_', '-')}" for name in own}


def unit_lines() -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            lines.setdefault(name, []).append(value)
    return lines


def test_the_unit_starts_the_server_as_a_user_of_its_own() -> None:
    lines = unit_lines()
    program, command, *words = shlex.split(lines["ExecStart"][0])
    assert pathlib.PurePath(program).name == "diffusers-dlo" and command == "serve"
    found = served(words)
    assert (found.host, found.ranks, found.device_budget) == ("127.0.0.1", 8, "auto")
    # The key comes from a file that only root can read, by the name under which systemd hands it over.
    assert found.api_key is None and found.api_key_file == "${CREDENTIALS_DIRECTORY}/api-key"
    assert lines["LoadCredential"] == ["api-key:/etc/diffusers-dlo/api-key"]
    assert found.model.startswith(lines["ReadOnlyPaths"][0] + "/")
    assert lines["User"] != ["root"] and lines["LimitMEMLOCK"] == ["infinity"]
    # Ranks must not get the signal to stop before the server has failed what they compute.
    assert (lines["KillMode"], lines["Restart"]) == (["mixed"], ["on-failure"])
    assert int(lines["TimeoutStopSec"][0]) > 10


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_has_nothing_against_the_unit(tmp_path: pathlib.Path) -> None:
    text = UNIT.read_text().replace("/opt/diffusers-dlo/bin/diffusers-dlo", sys.executable)

    def said_of(text: str) -> str:
        path = tmp_path / UNIT.name
        path.write_text(text)
        command = ["systemd-analyze", "verify", "--man=no", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return "\n".join(line for line in done.stderr.splitlines() if UNIT.name in line)

    assert said_of(text) == ""
    assert "KillMod" in said_of(text.replace("KillMode", "KillMod")), "a wrong line would not be noticed"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


def test_the_container_installs_and_starts_what_is_there() -> None:
    found = instructions()
    known = {"COPY", "FROM", "ENTRYPOINT", "RUN", "CMD", "ENV", "USER", "ARG", "WORKDIR", "EXPOSE", "HEALTHCHECK"}
    assert {name for name, _ in found} <= known
    by_name = dict(found)

    # Only what is copied can be installed, and only extras that there are; torch comes first, with a lower bound.
    copied = [word for name, value in found if name == "COPY" for word in value.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied) and {"setup.cfg", "pyproject.toml"} <= set(copied)
    (readme,) = re.findall(r"long_description = file: (\S+)", (ROOT / "setup.cfg").read_text())
    assert {"diffusers_dlo", readme} <= set(copied)
    pips = [shlex.split(value) for name, value in found if name == "RUN" and value.startswith("pip ")]
    assert [words[-1] for words in pips] == ["$TORCH", "/src[serve]"] and "serve" in extras()
    (bound,) = re.findall(r"^    torch (>= [\d.]+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    assert f'TORCH="torch{bound.replace(" ", "")}"' in [value for name, value in found if name == "ARG"]

    # Nothing runs as root after the last installation, and the key is a file.
    order = [name for name, _ in found]
    assert "RUN" not in order[order.index("USER") :] and by_name["USER"].isdigit() and by_name["USER"] != "0"
    program, command, *words = json.loads(by_name["ENTRYPOINT"]) + json.loads(by_name["CMD"])
    options = served(words)
    assert (program, command, options.model, options.host) == ("diffusers-dlo", "serve", "/model", "0.0.0.0")
    assert options.api_key is None and options.api_key_file == "/run/secrets/api-key"
    assert int(by_name["EXPOSE"]) == options.port


def test_the_health_check_asks_for_a_path_that_needs_no_key(tmp_path: pathlib.Path) -> None:
    (check,) = [value for name, value in instructions() if name == "HEALTHCHECK"]
    (python, flag, code) = json.loads(check[check.index("[") :])
    compile(code, "Containerfile", "exec")
    (port, path) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", code)[0]
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = read_options(served(["/model", "--host", "0.0.0.0", "--api-key-file", str(key)]))
    assert (python, flag, int(port)) == ("python", "-c", options.port)
    client = TestClient(make_app(options))  # outside `with`, so that no ranks are started
    assert client.get(path).status_code == 200 and client.get("/v1/models").status_code == 401


def test_the_proxy_waits_for_an_answer_longer_than_the_server_does() -> None:
    text = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text())
    limits = ServeOptions().limits
    assert text.count("{") == text.count("}") == 3
    assert all(line.rstrip().endswith((";", "{", "}")) for line in text.splitlines() if line.strip())
    assert int(re.findall(r"proxy_read_timeout (\d+)s;", text)[0]) > limits.seconds
    assert int(re.findall(r"client_max_body_size (\d+)m;", text)[0]) << 20 == limits.body
    assert "proxy_buffering off;" in text and "proxy_ignore_client_abort off;" in text
    assert f"proxy_pass http://127.0.0.1:{ServeOptions().port};" in text
